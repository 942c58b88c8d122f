//! An overview of a run in a few lines, at its start.

use std::collections::BTreeMap;

use roll_data::Batches;

use super::Trainer;
use super::rows::{counted_rows, row_noun};
use crate::config::CheckRewards;
use crate::progress::{counted, grouped, overview_line};
use crate::run_dir::RunDir;

/// At most this many shapes of clips are named.
const SHAPES: usize = 3;

impl Trainer {
    /// The run's parts: model, reward, algorithm, data, length, and the place of its files.
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
        let quoted = |name: &String| format!("`{name}`");
        let checks: Vec<String> = self.labels.checks().iter().map(quoted).collect();
        let checks = match config.evaluation.check {
            _ if checks.is_empty() => String::new(),
            CheckRewards::Listed(_) => format!("; checked by {}", checks.join(", ")),
            CheckRewards::Auto => format!("; checked by {} (not with `evaluation.check=[]`)", checks.join(", ")),
        };
        if !config.reward.is_empty() {
            let rewards: Vec<String> = config.reward.iter().map(|reward| quoted(&reward.name)).collect();
            add("reward", format!("{}{checks}", rewards.join(" + ")));
        }
        if let Some(env) = &config.env {
            add("environment", format!("`{}`", env.name));
        }
        let going_on = match self.steps_done {
            0 => String::new(),
            done if done >= self.steps => ", all done; raise `steps` to train further".into(),
            done => format!(", {done} done"),
        };
        match &self.data {
            Some(data) => {
                let noun = row_noun(data.dataset().metadata());
                add(if noun == "clip" { "clips" } else { "data" }, clips(data));
                let batch = counted(data.global_batch() as u64, noun);
                let epochs = epochs(data.epoch(self.steps));
                add("steps", format!("{} of {batch} each, {epochs} epochs{going_on}", self.steps));
            }
            None => add("steps", format!("{}{going_on}; `{algorithm}` brings its own data", self.steps)),
        }
        if let Some(evaluator) = &self.evaluator {
            let when = match config.evaluation.every {
                0 => "before and after".to_string(),
                every => format!("before, after and every {}", counted(every, "step")),
            };
            add("evaluation", format!("{}, {when}", counted(evaluator.clips() as u64, "clip")));
        }
        if let Some(prompts) = &self.sample_prompts {
            add("prompts", format!("{} with each evaluation", counted(prompts.count() as u64, "video")));
        }
        let saves = match config.save_steps {
            0 => "a checkpoint at the end".to_string(),
            every => format!("a checkpoint every {}", counted(every, "step")),
        };
        add("output", format!("{}, {saves}", dir.path().display()));
        lines
    }
}

/// Formats a number with two significant digits.
pub fn epochs(epochs: f64) -> String {
    if epochs < 1.0 { format!("{epochs:.2}") } else { format!("{epochs:.1}") }
}

/// How many clips and prompts there are, and in which shapes.
fn clips(data: &Batches) -> String {
    let dataset = data.dataset();
    let count = counted_rows(dataset.metadata());
    if !dataset.has_buckets() {
        let config = dataset.config();
        let size = match (config.height, config.width) {
            (Some(height), Some(width)) => format!("{width}x{height}"),
            _ => "their own size".into(),
        };
        return format!("{count} of {size}, up to {}", counted(dataset.longest() as u64, "frame"));
    }
    let mut shapes: BTreeMap<_, usize> = BTreeMap::new();
    (0..dataset.len()).filter_map(|i| dataset.bucket(i)).for_each(|bucket| *shapes.entry(bucket).or_default() += 1);
    let more = shapes.len().saturating_sub(SHAPES);
    let named = shapes.iter().take(SHAPES).map(|(bucket, count)| {
        let [height, width] = bucket.size;
        format!("{count} of {width}x{height} with {}", counted(bucket.frames as u64, "frame"))
    });
    let named = named.collect::<Vec<_>>().join(", ");
    let more = if more > 0 { format!(" and {more} more shapes") } else { String::new() };
    format!("{count}: {named}{more}")
}
