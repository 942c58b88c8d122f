//! The overview of a run that is logged at its start, in a few lines.

use super::Trainer;
use crate::progress::{counted, grouped, overview_line};
use crate::run_dir::RunDir;

impl Trainer {
    /// The lines of the overview: model, ranks, learning rate, what is trained on, length, and where files are written.
    pub(super) fn overview(&self, dir: &RunDir) -> Vec<String> {
        let config = &self.loaded.config;
        let mut lines = Vec::new();
        let mut add = |subject: &str, text: String| lines.push(overview_line(subject, &text));
        let ranks = match self.strategy.ranks().all.world_size() {
            1 => String::new(),
            ranks => format!(", {ranks} ranks"),
        };
        let parameters = grouped(self.model.parameter_count() as u64);
        let (algorithm, model) = (&config.algo.name, &config.model.name);
        add("training", format!("{parameters} parameters of `{model}` by `{algorithm}`, on {}{ranks}", config.backend));
        add("", config.training.rate_in_words());
        let steps_suffix = match self.steps_done {
            0 => String::new(),
            done if done >= self.steps => ", all done; raise `steps` to train further".into(),
            done => format!(", {done} done"),
        };
        for (subject, text) in self.task.overview(config, &steps_suffix) {
            add(subject, text);
        }
        let saves = match config.save_steps {
            0 => "a checkpoint at the end".to_string(),
            every => format!("a checkpoint every {}", counted(every, "step")),
        };
        add("output", format!("{}, {saves}", dir.path().display()));
        lines
    }
}
