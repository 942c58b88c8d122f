//! Metrics of a run: `metrics.jsonl` for programs, TensorBoard event files for people.
//!
//! [`MetricsWriter`] writes both at every step; a resumed run replaces the lines of the steps that it repeats.

mod jsonl;
mod tensorboard;

use std::collections::BTreeMap;
use std::path::Path;

pub use jsonl::{JsonlWriter, read_jsonl};
pub use tensorboard::EventWriter;

use crate::config::{RunConfig, Tracker};
use crate::on_metrics::OnMetrics;
use roll_core::Result;

/// Writes both, or the one that is wanted, and passes lines to the command of `on_metrics`.
#[derive(Debug)]
pub struct MetricsWriter {
    jsonl: Option<JsonlWriter>,
    events: Option<EventWriter>,
    command: Option<OnMetrics>,
}

impl MetricsWriter {
    /// Writes into the run directory `run`. Steps from `from_step` on that are already there are dropped: a run that
    /// was killed after its last checkpoint does them again. Each `logging_steps`-th step has a line.
    pub fn create(run: &Path, from_step: u64, config: &RunConfig) -> Result<Self> {
        let RunConfig { track_with, logging_steps: every, on_metrics, .. } = config;
        let with = |tracker| track_with.contains(&tracker);
        let jsonl = || JsonlWriter::resume(&run.join("metrics.jsonl"), from_step, *every);
        Ok(Self {
            jsonl: with(Tracker::Jsonl).then(jsonl).transpose()?,
            events: with(Tracker::Tensorboard).then(|| EventWriter::create(run)).transpose()?,
            command: OnMetrics::start(on_metrics, run),
        })
    }

    /// Writes the metrics of one step. A value that is not finite is `null` in the JSON, with a warning.
    pub fn log(&mut self, step: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        if let Some(jsonl) = &mut self.jsonl {
            jsonl.write(step, metrics)?;
        }
        if let Some(command) = &mut self.command {
            command.write(&jsonl::line(step, metrics));
        }
        let Some(events) = &mut self.events else { return Ok(()) };
        for (name, value) in metrics {
            events.scalar(name, *value, step)?;
        }
        events.flush()
    }

    /// Makes the lines of `metrics.jsonl` last over a power cut: before a checkpoint of their steps is there.
    pub fn sync(&mut self) -> Result<()> {
        self.jsonl.as_mut().map_or(Ok(()), JsonlWriter::sync)
    }

    /// Shows a picture in TensorBoard: the bytes of a PNG, or of an animated GIF, which it plays.
    pub fn image(&mut self, step: u64, name: &str, encoded: &[u8], size: [usize; 2]) -> Result<()> {
        let Some(events) = &mut self.events else { return Ok(()) };
        events.image(name, encoded, size, step)?;
        events.flush()
    }
}
