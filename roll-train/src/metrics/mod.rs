//! Metrics of a run: `metrics.jsonl` for programs, TensorBoard event files for people.

mod jsonl;
mod tensorboard;

use std::collections::BTreeMap;
use std::path::Path;

pub use jsonl::{JsonlWriter, read_jsonl};
pub use tensorboard::EventWriter;

use roll_core::Result;

/// Writes both.
#[derive(Debug)]
pub struct MetricsWriter {
    jsonl: JsonlWriter,
    events: EventWriter,
}

impl MetricsWriter {
    /// Writes into the run directory `run`. Steps from `from_step` on that are already there are dropped: a run that
    /// was killed after its last checkpoint does them again.
    pub fn create(run: &Path, from_step: u64) -> Result<Self> {
        let jsonl = JsonlWriter::resume(&run.join("metrics.jsonl"), from_step)?;
        Ok(Self { jsonl, events: EventWriter::create(run)? })
    }

    /// Writes the metrics of one step. A value that is not finite is `null` in the JSON, with a warning.
    pub fn log(&mut self, step: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        self.jsonl.write(step, metrics)?;
        for (name, value) in metrics {
            self.events.scalar(name, *value, step)?;
        }
        self.events.flush()
    }

    /// Makes the lines of `metrics.jsonl` last over a power cut: before a checkpoint of their steps is there.
    pub fn sync(&mut self) -> Result<()> {
        self.jsonl.sync()
    }

    /// Shows a picture in TensorBoard: the bytes of a PNG, or of an animated GIF, which it plays.
    pub fn image(&mut self, step: u64, name: &str, encoded: &[u8], size: [usize; 2]) -> Result<()> {
        self.events.image(name, encoded, size, step)?;
        self.events.flush()
    }

    /// Shows text (Markdown) in TensorBoard.
    pub fn text(&mut self, step: u64, name: &str, text: &str) -> Result<()> {
        self.events.text(name, text, step)?;
        self.events.flush()
    }
}
