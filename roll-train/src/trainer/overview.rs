//! What a run is about to do, in a few lines at its start.

use std::collections::BTreeMap;

use roll_data::Batches;

use super::Trainer;
use crate::progress::counted;
use crate::run_dir::RunDir;

/// At most this many shapes of clips are named.
const SHAPES: usize = 3;

impl Trainer {
    /// What is trained with what, on what, for how long, and where it writes.
    pub(super) fn overview(&self, dir: &RunDir) -> Vec<String> {
        let config = &self.loaded.config;
        let mut lines = Vec::new();
        let rewards: Vec<String> = config.reward.iter().map(|reward| format!("`{}`", reward.name)).collect();
        let with = match rewards.is_empty() {
            true => String::new(),
            false => format!(" with the reward {}", rewards.join(" + ")),
        };
        let (count, model) = (self.model.parameter_count(), &config.model.name);
        lines.push(format!("`{}` trains {count} parameters of `{model}`{with}", config.algo.name));
        let steps = counted(self.steps, "step");
        let going_on = if self.done > 0 { format!(", {} done", self.done) } else { String::new() };
        lines.push(match &self.data {
            Some(data) => {
                let batch = data.global_batch();
                format!(
                    "{}; {steps} of {} each{going_on}: {} epochs",
                    clips(data),
                    counted(batch as u64, "clip"),
                    epochs(data.epoch(self.steps))
                )
            }
            None => format!("{steps}{going_on}; the data are the algorithm's own"),
        });
        if let Some(evaluator) = &self.evaluator {
            let when = match config.evaluation.every {
                0 => "before and after".to_string(),
                every => format!("before, after and every {}", counted(every, "step")),
            };
            lines.push(format!("{} evaluated {when}", counted(evaluator.clips() as u64, "clip")));
        }
        if let Some(prompts) = &self.prompts {
            lines.push(format!("{} each time", counted(prompts.count() as u64, "sample prompt")));
        }
        let saves = match config.save_steps {
            0 => "a checkpoint at the end".to_string(),
            every => format!("a checkpoint every {}", counted(every, "step")),
        };
        lines.push(format!("writing to {}, {saves}", dir.path().display()));
        lines
    }
}

/// With two digits that say something.
pub fn epochs(epochs: f64) -> String {
    if epochs < 1.0 { format!("{epochs:.2}") } else { format!("{epochs:.1}") }
}

/// How many clips there are, and in which shapes.
fn clips(data: &Batches) -> String {
    let dataset = data.dataset();
    let count = counted(dataset.len() as u64, "clip");
    if !dataset.has_buckets() {
        let config = dataset.config();
        let size = match (config.height, config.width) {
            (Some(height), Some(width)) => format!("{width}x{height}"),
            _ => "their own size".into(),
        };
        return format!("{count} of {size}, up to {}", counted(config.num_frames as u64, "frame"));
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
