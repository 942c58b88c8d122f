//! Metrics of a run: `metrics.jsonl` for programs, TensorBoard event files for people.
//!
//! [`MetricsWriter`] writes both at every logged step. A resumed run replaces the lines of the steps that it takes
//! again.

mod jsonl;
mod tensorboard;

use std::collections::BTreeMap;
use std::path::Path;

pub use jsonl::{JsonlWriter, read_jsonl};
pub use tensorboard::EventWriter;

use crate::config::{RunConfig, Tracker};
use crate::on_metrics::OnMetrics;
use roll_core::Result;

/// Writes the files that `track_with` names, and passes the lines to the command of `on_metrics`.
#[derive(Debug)]
pub struct MetricsWriter {
    jsonl: Option<JsonlWriter>,
    events: Option<EventWriter>,
    command: Option<OnMetrics>,
}

impl MetricsWriter {
    /// Opens the files in the run directory `run`. Lines of steps from `from_step` on are removed, because a run that
    /// was killed after its last checkpoint takes these steps again.
    pub fn create(run: &Path, from_step: u64, config: &RunConfig) -> Result<Self> {
        let is_wanted = |tracker| config.track_with.contains(&tracker);
        let jsonl = match is_wanted(Tracker::Jsonl) {
            true => Some(JsonlWriter::resume(&run.join("metrics.jsonl"), from_step, config.logging_steps)?),
            false => None,
        };
        let events = match is_wanted(Tracker::Tensorboard) {
            true => Some(EventWriter::create(run)?),
            false => None,
        };
        Ok(Self { jsonl, events, command: OnMetrics::start(&config.on_metrics, run) })
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

    /// Syncs `metrics.jsonl`, so that its lines survive a power cut. Called before the checkpoint of these steps is
    /// written.
    pub fn sync(&mut self) -> Result<()> {
        match &mut self.jsonl {
            Some(jsonl) => jsonl.sync(),
            None => Ok(()),
        }
    }

    /// Shows a picture in TensorBoard. `encoded` is a PNG, or an animated GIF, which TensorBoard plays.
    pub fn image(&mut self, step: u64, name: &str, encoded: &[u8], height_and_width: [usize; 2]) -> Result<()> {
        let Some(events) = &mut self.events else { return Ok(()) };
        events.image(name, encoded, height_and_width, step)?;
        events.flush()
    }
}
