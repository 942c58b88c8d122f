//! The lines on clips, rewards and evaluations in the overview of a run.

use std::collections::BTreeMap;

use roll_train::config::RunConfig;
use roll_train::progress::{counted, epochs};
use roll_train::task::component_lines;

use super::config::CheckRewards;
use super::rows::{counted_rows, row_noun};
use super::{ClipTask, HeldOut};
use crate::rows::Batches;

/// Maximum number of shapes of clips that are named.
const MAX_SHAPES: usize = 3;

/// The lines of the overview: subject and text. `going_on` is the end of the line on steps.
pub(super) fn lines(task: &ClipTask, config: &RunConfig, going_on: &str) -> Vec<(&'static str, String)> {
    let mut lines = component_lines(config, &checks(task));
    let (data, steps) = (&task.data, task.facts.steps);
    let noun = row_noun(data.dataset().metadata());
    lines.push((if noun == "clip" { "clips" } else { "data" }, clips(data)));
    let batch = counted(data.global_batch() as u64, noun);
    lines.push(("steps", format!("{steps} of {batch} each, {} epochs{going_on}", epochs(data.epoch(steps)))));
    if let HeldOut::Evaluated(evaluator) = &task.held_out {
        let when = match task.config.evaluation.every {
            0 => "before and after".to_string(),
            every => format!("before, after and every {}", counted(every, "step")),
        };
        lines.push(("evaluation", format!("{}, {when}", counted(evaluator.clips() as u64, "clip"))));
    }
    if let Some(prompts) = &task.prompts {
        lines.push(("prompts", format!("{} with each evaluation", counted(prompts.count() as u64, "video"))));
    }
    lines
}

/// The end of the line on rewards: the rewards that check the trained rewards.
fn checks(task: &ClipTask) -> String {
    let checks: Vec<String> = task.facts.labels.checks().iter().map(|name| format!("`{name}`")).collect();
    match task.config.evaluation.check {
        _ if checks.is_empty() => String::new(),
        CheckRewards::Listed(_) => format!("; checked by {}", checks.join(", ")),
        CheckRewards::Auto => format!("; checked by {} (not with `evaluation.check=[]`)", checks.join(", ")),
    }
}

/// The numbers of clips and prompts, and their shapes.
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
    let unnamed = shapes.len().saturating_sub(MAX_SHAPES);
    let named = shapes.iter().take(MAX_SHAPES).map(|(bucket, count)| {
        let [height, width] = bucket.size;
        format!("{count} of {width}x{height} with {}", counted(bucket.frames as u64, "frame"))
    });
    let named = named.collect::<Vec<_>>().join(", ");
    let more = if unnamed > 0 { format!(" and {unnamed} more shapes") } else { String::new() };
    format!("{count}: {named}{more}")
}
