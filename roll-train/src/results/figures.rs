//! The numbers that sum up a run, for its metrics, `summary.json` and the terminal: scores before and after training.

use std::collections::BTreeMap;

use roll_core::{Headline, HeadlineFormat, HeldOut};
use serde_json::{Value, json};

use super::labels::SetLabels;
use super::record::{Comparison, Record, ValidationMetrics};
use super::scores::{self, Change, Results};
use crate::progress::counted;
use crate::statistics::{Gain, paired_gain};

/// The metrics of an evaluation, for each set of clips: `eval/unseen`, `eval/unseen_check`, `eval/unseen_kl`, and
/// `eval/unseen_check_NAME` for each of several checks.
pub fn metrics(results: &Results, labels: &SetLabels) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    for (set, clips) in results {
        let label = labels.of(*set);
        for (reward, suffix) in labels.suffixes().into_iter().enumerate() {
            if let Some(score) = scores::mean_score(clips, reward) {
                metrics.insert(format!("eval/{label}{suffix}"), score);
            }
        }
        if let Some(kl) = scores::mean_kl(clips) {
            metrics.insert(format!("eval/{label}_kl"), kl);
        }
    }
    metrics
}

/// The change of the scores of each set, with its name (`unseen`, `unseen_check`). Changes by the trained reward come
/// first, then changes by the sum of the rewards of `evaluation.check`, then changes by each of these rewards.
fn changes(record: &Record, labels: &SetLabels) -> Vec<(String, Change)> {
    let Some((before, after)) = record.first_and_last_evaluation() else { return Vec::new() };
    let mut changes = Vec::new();
    for (reward, suffix) in labels.suffixes().into_iter().enumerate() {
        for (name, clips) in before {
            if let Some(change) = scores::change(clips, scores::of(after, *name), reward) {
                changes.push((format!("{}{suffix}", labels.of(*name)), change));
            }
        }
    }
    changes
}

/// Mean divergence of the trained model from the base model over all evaluated clips.
fn kl(record: &Record) -> Option<f64> {
    let (_, last) = record.first_and_last_evaluation()?;
    scores::mean_kl(last.iter().flat_map(|(_, clips)| clips))
}

/// A quantity on held-out data, before and after training.
pub struct ValidationChange<'a> {
    pub held_out: &'a HeldOut,
    /// How the values are written.
    pub format: HeadlineFormat,
    pub before: f64,
    pub after: f64,
    /// The mean change over samples, if the quantity is their mean loss.
    pub gain: Option<Gain>,
}

/// The changes of the headline metrics that are validated.
pub fn validation_changes<'a>(record: &Record, headlines: &'a [Headline]) -> Vec<ValidationChange<'a>> {
    let [first, .., last] = record.validations.as_slice() else { return Vec::new() };
    let value = |validated: &ValidationMetrics, metric: &str| validated.metrics.get(metric).copied().flatten();
    let losses: Vec<[f64; 2]> = first.losses.iter().zip(&last.losses).map(|(first, last)| [*first, *last]).collect();
    let has_pairs = losses.len() > 1 && first.losses.len() == last.losses.len();
    let gain_of_loss = if has_pairs { Some(paired_gain(&losses)) } else { None };
    let change = |headline: &'a Headline| {
        let held_out = headline.held_out.as_ref()?;
        let (before, after) = (value(first, &held_out.metric)?, value(last, &held_out.metric)?);
        let gain = if held_out.metric == "val/loss" { gain_of_loss } else { None };
        Some(ValidationChange { held_out, format: headline.format, before, after, gain })
    };
    headlines.iter().filter_map(change).collect()
}

/// The numbers in `summary.json`:
///
/// - for each set of clips `unseen_before`, `unseen_after`, `unseen_gain` (with its confidence interval),
///   `unseen_clips` and `unseen_missing`; the same with the suffix `_check` for the rewards of `evaluation.check`
///   (`_check_NAME` for each of several),
/// - `compared`, if videos after training were compared with videos before,
/// - `kl` after training,
/// - for each quantity on held-out data, such as `success`, `success_before` and `success_after`; for a loss also its
///   gain.
pub fn figures(record: &Record, headlines: &[Headline], labels: &SetLabels) -> BTreeMap<String, Value> {
    let mut figures = BTreeMap::new();
    for ValidationChange { held_out, before, after, gain, .. } in validation_changes(record, headlines) {
        if let Some(gain) = gain {
            figures.insert(format!("{}_gain", held_out.label), json!(gain));
        }
        figures.insert(format!("{}_before", held_out.label), json!(before));
        figures.insert(format!("{}_after", held_out.label), json!(after));
    }
    for (name, change) in changes(record, labels) {
        figures.insert(format!("{name}_before"), json!(change.before));
        figures.insert(format!("{name}_after"), json!(change.after));
        figures.insert(format!("{name}_gain"), json!(change.gain));
        figures.insert(format!("{name}_clips"), json!(change.clips));
        figures.insert(format!("{name}_missing"), json!(change.missing));
    }
    if let Some(comparison) = record.comparison {
        figures.insert("compared".into(), json!(comparison));
    }
    if let Some(kl) = kl(record) {
        figures.insert("kl".into(), json!(kl));
    }
    figures
}

/// The numbers of [`figures`] for the terminal: lines of a name and a text.
pub fn lines(record: &Record, headlines: &[Headline], labels: &SetLabels) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for ValidationChange { held_out, format, before, after, gain } in validation_changes(record, headlines) {
        let gain = gain.map(|gain| format!(", {}", gain.in_words())).unwrap_or_default();
        let [before, after] = format.write_apart([before, after]);
        lines.push((held_out.label.clone(), format!("{before} -> {after}{gain}, on {}", held_out.data)));
    }
    for (name, change) in changes(record, labels) {
        let [before, after] = change.ends();
        let mut clips = counted(change.clips as u64, "clip");
        if change.missing > 0 {
            clips += &format!(", {} without a score", change.missing);
        }
        let gain = change.gain.in_words();
        let gain = match gain.strip_suffix(')') {
            // "+0.200 (95 % +0.152 to +0.248; 24 clips)".
            Some(gain_and_interval) => format!("{gain_and_interval}; {clips})"),
            // One clip has no interval.
            None => format!("{gain} ({clips})"),
        };
        lines.push((name.replace('_', " "), format!("{before} -> {after}, {gain}")));
    }
    if let Some(Comparison { after, before, equal }) = record.comparison {
        lines.push(("after against before".into(), format!("{after} won, {before} lost, {equal} equal")));
    }
    if let Some(kl) = kl(record) {
        lines.push(("evaluated kl".into(), if kl == 0.0 { "0".into() } else { format!("{kl:.3e}") }));
    }
    lines
}
