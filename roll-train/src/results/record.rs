//! The record of a run: the facts of which its summary and its report are made. It is part of every checkpoint, so that
//! a resumed run ends with the same summary as one that never stopped.

use std::collections::BTreeMap;

use roll_core::{Error, Result, StepReport};
use roll_external::files::{self, write_atomically};
use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::config::without_secrets;
use crate::results::scores::Results;

/// Maximum number of skipped samples that are listed. Further samples are only counted.
const MAX_LISTED: usize = 200;

/// Metrics by name; `None` where the value was not finite, which JSON cannot represent.
pub type Metrics = BTreeMap<String, Option<f64>>;

/// The record of a run so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Wall-clock seconds of the training loop, summed over restarts. Steps that a restart repeats count once.
    pub seconds: f64,
    /// Metrics of the first step.
    pub first: Metrics,
    /// Metrics of the last step.
    pub last: Metrics,
    /// Number of samples that were left out.
    pub skipped_samples: u64,
    /// The first samples that were left out, at most 200.
    pub skipped: Vec<Skipped>,
    /// Number of updates that were left out because a value was not finite.
    pub skipped_updates: u64,
    /// Number of updates whose gradient was scaled down to `training.max_grad_norm`.
    pub clipped_updates: u64,
    /// Steps in a row, until the last one, in which no parameter changed.
    pub idle_steps: u64,
    /// Hash of the parameters after the last step, if they are few enough.
    #[serde(rename = "parameters", skip_serializing_if = "Option::is_none")]
    pub parameters_hash: Option<u64>,
    /// Evaluations in the order of their steps.
    pub evaluations: Vec<Evaluation>,
    /// The first evaluation in which the reward had risen and checks had fallen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspicion: Option<Suspicion>,
    /// Number of rows of `evaluation.metadata` that are trained on, too.
    #[serde(skip_serializing_if = "is_zero")]
    pub seen: usize,
    /// Validations in the order of their steps.
    pub validations: Vec<ValidationMetrics>,
    /// The comparison of videos after training with videos before, by a reward that compares videos.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comparison: Option<Comparison>,
    /// Metrics of the last step if the run was stopped before that step's evaluation: they are not logged yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<Metrics>,
}

/// Whether serde leaves out a count.
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// A sample that was left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// The step, counted from 1; 0 for the evaluation before training.
    pub step: u64,
    /// The sample's file and row.
    pub sample: String,
    /// Why it was left out.
    pub reason: String,
}

/// An evaluation that suggests reward hacking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Suspicion {
    /// Number of steps taken before the evaluation.
    pub step: u64,
    /// The warning.
    pub text: String,
}

/// The numbers of evaluated clips by which of two videos was preferred: the one after training, or the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// Clips of which the video after training was better.
    pub after: u64,
    /// Clips of which the video before training was better.
    pub before: u64,
    /// Clips whose two videos were equally good.
    pub equal: u64,
}

/// Scores of one evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Number of steps taken before the evaluation.
    pub step: u64,
    /// Scores of each set.
    pub results: Results,
}

/// Metrics of one validation, for example of an agent in its environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationMetrics {
    /// Number of steps taken before the validation.
    pub step: u64,
    /// Metrics of the validation.
    pub metrics: Metrics,
    /// The losses of its samples, if the loss is their mean.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub losses: Vec<f64>,
}

impl Record {
    /// Counts the samples and the update that a step left out, and the clipping of its gradient. `parameters_hash` is
    /// the hash of the parameters after the step; `None` if it is not computed.
    pub fn add_step(&mut self, step: u64, report: &StepReport, max_grad_norm: f64, parameters_hash: Option<u64>) {
        // An update that was applied counts as a change if there is no hash.
        let has_changed = report.applied && (parameters_hash.is_none() || parameters_hash != self.parameters_hash);
        self.idle_steps = if has_changed { 0 } else { self.idle_steps + 1 };
        self.parameters_hash = parameters_hash;
        self.skipped_samples += report.skipped.len() as u64;
        let room = MAX_LISTED.saturating_sub(self.skipped.len());
        for (sample, reason) in report.skipped.iter().take(room) {
            self.skipped.push(Skipped { step, sample: sample.clone(), reason: without_secrets(reason) });
        }
        if !report.applied {
            self.skipped_updates += 1;
        }
        let norm = report.metrics.get("actor/grad_norm");
        if max_grad_norm > 0.0 && norm.is_some_and(|norm| *norm > max_grad_norm) {
            self.clipped_updates += 1;
        }
    }

    /// The reasons for which samples were left out from step `first_step` on. Each has the number of samples and the
    /// first of them.
    pub fn skip_reasons(&self, first_step: u64) -> BTreeMap<&str, (usize, &str)> {
        let mut reasons = BTreeMap::new();
        for skipped in self.skipped.iter().filter(|skipped| skipped.step >= first_step) {
            let (count, _) = reasons.entry(skipped.reason.as_str()).or_insert((0, skipped.sample.as_str()));
            *count += 1;
        }
        reasons
    }

    /// The first and the last evaluation, of a run that has at least two.
    pub fn first_and_last_evaluation(&self) -> Option<(&Results, &Results)> {
        match self.evaluations.as_slice() {
            [first, .., last] => Some((&first.results, &last.results)),
            _ => None,
        }
    }

    /// Records the metrics of a finished step.
    pub fn set_last(&mut self, metrics: &BTreeMap<String, f64>) {
        self.last = stored(metrics);
        if self.first.is_empty() {
            self.first = self.last.clone();
        }
    }
}

/// The record's file in a checkpoint.
pub(crate) const RECORD_FILE: &str = "trainer/record.json";

/// The file of the record after the evaluation of the checkpoint's step. A checkpoint that is written before that
/// evaluation gets this file later, by [`amend`], so the manifest does not list it.
const AMENDED_FILE: &str = "trainer/record-evaluated.json";

/// Reads the record of a checkpoint; empty if the checkpoint's version of roll wrote none.
pub fn read_record(checkpoint: &Checkpoint) -> Result<Record> {
    if !checkpoint.manifest().files.contains_key(RECORD_FILE) {
        return Ok(Record::default());
    }
    let problem = |e| Error::bad_file(checkpoint.path().join(RECORD_FILE), format!("no record of a run: {e}"));
    let record: Record = serde_json::from_slice(&checkpoint.read(RECORD_FILE)?).map_err(problem)?;
    if record.pending.is_none() {
        return Ok(record);
    }
    let amended = files::read(&checkpoint.path().join(AMENDED_FILE), files::MAX_TEXT).ok();
    let amended = amended.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    // If the amended record is missing or cannot be read, the pending step is evaluated again.
    Ok(amended.unwrap_or(record))
}

/// Adds a record with measurements that were made after the checkpoint was written.
pub(crate) fn amend(checkpoint: &Checkpoint, record: &Record) -> Result<()> {
    let json =
        serde_json::to_vec_pretty(record).map_err(Error::failed("the record of the run cannot be written as JSON"))?;
    write_atomically(&checkpoint.path().join(AMENDED_FILE), &json)
}

/// Metrics in the form that JSON can represent.
pub fn stored(metrics: &BTreeMap<String, f64>) -> Metrics {
    metrics.iter().map(|(name, value)| (name.clone(), value.is_finite().then_some(*value))).collect()
}

/// Stored metrics in the form that is logged: NaN where a value was not finite.
pub fn restored(metrics: &Metrics) -> BTreeMap<String, f64> {
    metrics.iter().map(|(name, value)| (name.clone(), value.unwrap_or(f64::NAN))).collect()
}
