//! What a run remembers beside parameters and optimizer, so that a resumed one ends with the summary of one that never
//! stopped.

use std::collections::BTreeMap;

use roll_core::{Error, Result, StepReport};
use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::evaluation::Results;

/// Samples that are remembered by name; beyond them they are only counted.
const NAMED: usize = 200;

/// Metrics by name; `None` where the value was not finite, which JSON cannot say.
pub type Metrics = BTreeMap<String, Option<f64>>;

/// The course of a run so far. Part of every checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Wall-clock seconds in the loop, over all processes; what was done again after a kill counts once.
    pub seconds: f64,
    /// Metrics of the first step.
    pub first: Metrics,
    /// Metrics of the last step.
    pub last: Metrics,
    /// Samples that were left out.
    pub skipped_samples: u64,
    /// The first of them.
    pub skipped: Vec<Skipped>,
    /// Updates that were left out because a value was not finite.
    pub skipped_updates: u64,
    /// Updates whose gradient was scaled down to `training.max_grad_norm`.
    pub clipped_updates: u64,
    /// Evaluations, in order.
    pub evaluations: Vec<Evaluation>,
    /// Validations, in order.
    pub validations: Vec<Validated>,
    /// Metrics of the last step when the run was stopped before its evaluation: nothing of the step is logged yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<Metrics>,
}

/// A sample that was left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// Step, from 1.
    pub step: u64,
    /// File and row.
    pub sample: String,
    /// Why.
    pub reason: String,
}

/// What an evaluation found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps taken before it.
    pub step: u64,
    /// Set by set.
    pub results: Results,
}

/// What a validation measured: an agent in its environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Validated {
    /// Steps taken before it.
    pub step: u64,
    /// Its metrics.
    pub metrics: Metrics,
}

impl Record {
    /// Counts a step that was done.
    pub fn step(&mut self, step: u64, report: &StepReport, max_grad_norm: f64) {
        self.skipped_samples += report.skipped.len() as u64;
        let room = NAMED.saturating_sub(self.skipped.len());
        let named = report.skipped.iter().take(room).cloned();
        self.skipped.extend(named.map(|(sample, reason)| Skipped { step, sample, reason }));
        self.skipped_updates += u64::from(!report.applied);
        let norm = report.metrics.get("actor/grad_norm");
        self.clipped_updates += u64::from(max_grad_norm > 0.0 && norm.is_some_and(|norm| *norm > max_grad_norm));
    }

    /// Remembers the metrics of a finished step.
    pub fn finished(&mut self, metrics: &BTreeMap<String, f64>) {
        self.last = stored(metrics);
        if self.first.is_empty() {
            self.first = self.last.clone();
        }
    }
}

/// The record in a checkpoint.
pub(crate) const RECORD_FILE: &str = "trainer/record.json";

/// The record in a checkpoint; empty when it was written before there were records.
pub fn recorded(checkpoint: &Checkpoint) -> Result<Record> {
    if !checkpoint.manifest().files.contains_key(RECORD_FILE) {
        return Ok(Record::default());
    }
    let problem = |e| Error::bad_file(checkpoint.path().join(RECORD_FILE), format!("no record of a run: {e}"));
    serde_json::from_slice(&checkpoint.read(RECORD_FILE)?).map_err(problem)
}

/// As they are kept.
pub fn stored(metrics: &BTreeMap<String, f64>) -> Metrics {
    metrics.iter().map(|(name, value)| (name.clone(), value.is_finite().then_some(*value))).collect()
}

/// As they are logged.
pub fn restored(metrics: &Metrics) -> BTreeMap<String, f64> {
    metrics.iter().map(|(name, value)| (name.clone(), value.unwrap_or(f64::NAN))).collect()
}
