//! What rank 0 writes while a run goes on: configuration, metrics, sample videos.

use std::collections::BTreeMap;

use roll_core::config::Loaded;
use roll_core::metrics::MetricsWriter;
use roll_core::run_dir::RunDir;
use roll_core::{Result, StepReport};
use roll_data::{encode_gif, write_mp4};

use crate::outcome;
use crate::record::{self, Record};
use crate::trajectories::Trajectories;

/// Longer side of the pictures in TensorBoard, in pixels.
const GIF_SIDE: usize = 256;

/// Opened by the first step that is done: a mistake that shows before it leaves nothing behind.
pub(super) struct Journal {
    /// Only rank 0 has one.
    pub(super) dir: Option<RunDir>,
    metrics: Option<MetricsWriter>,
    trajectories: Trajectories,
    /// Episodes from before the first step is done.
    early: Vec<serde_json::Value>,
    /// Steps done before this process.
    before: u64,
}

impl Journal {
    pub(super) fn new(dir: Option<&RunDir>, before: u64) -> Self {
        Self { dir: dir.cloned(), metrics: None, trajectories: Trajectories::new(dir), early: Vec::new(), before }
    }

    /// Writes the configuration and opens the metrics, which then hold the steps before this process and no others.
    pub(super) fn open(&mut self, loaded: &Loaded, record: &Record, identity: bool) -> Result<()> {
        let (Some(dir), None) = (&self.dir, &self.metrics) else { return Ok(()) };
        dir.write_config(&loaded.resolved_yaml()?)?;
        let first = if self.before == 0 { 0 } else { self.before + 1 };
        // The step at which the process before stopped was not logged if it stopped before its evaluation.
        let first = first - u64::from(self.before > 0 && record.pending.is_some());
        let metrics = self.metrics.insert(MetricsWriter::create(dir.path(), first)?);
        let mut found = BTreeMap::new();
        for evaluation in record.evaluations.iter().filter(|e| e.step == 0) {
            found.extend(outcome::metrics(&evaluation.results, identity));
        }
        for validation in record.validations.iter().filter(|v| v.step == 0) {
            found.extend(record::restored(&validation.metrics));
        }
        if self.before == 0 && !found.is_empty() {
            metrics.log(0, &found)?;
        }
        self.trajectories.begin(self.before, record.pending.is_none())?;
        self.trajectories.write(&std::mem::take(&mut self.early))
    }

    /// Writes what an agent saw and did.
    pub(super) fn keep(&mut self, episodes: Vec<serde_json::Value>) -> Result<()> {
        match self.metrics {
            Some(_) => self.trajectories.write(&episodes),
            None => {
                self.early.extend(episodes);
                Ok(())
            }
        }
    }

    /// Tells what was left out, and writes the videos of a step.
    pub(super) fn tell(&mut self, step: u64, report: &StepReport) -> Result<()> {
        let (Some(dir), Some(metrics)) = (&self.dir, &mut self.metrics) else { return Ok(()) };
        self.trajectories.write(&report.records)?;
        for (sample, reason) in &report.skipped {
            tracing::warn!("step {step}: {sample} was left out: {reason}");
        }
        if !report.applied {
            tracing::warn!("step {step}: nothing was updated");
        }
        for (name, video) in &report.videos {
            write_mp4(dir.samples(step)?.join(format!("{name}.mp4")), video)?;
            let gif = encode_gif(video, GIF_SIDE)?;
            let [_, height, width] = video.dims();
            metrics.image(step, &format!("samples/{name}"), &gif, [height, width])?;
        }
        Ok(())
    }

    /// Writes the metrics of a step.
    pub(super) fn log(&mut self, step: u64, steps: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        let Some(writer) = &mut self.metrics else { return Ok(()) };
        writer.log(step, metrics)?;
        tracing::info!("{}", line(step, steps, metrics));
        Ok(())
    }

    /// Makes the metrics last over a power cut.
    pub(super) fn sync(&mut self) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), MetricsWriter::sync)
    }
}

/// One line for people: of these metrics, those that the algorithm has.
fn line(step: u64, steps: u64, metrics: &BTreeMap<String, f64>) -> String {
    let mut line = format!("step {step}/{steps}");
    let mut add = |label: &str, name: &str, written: fn(f64) -> String| {
        if let Some(value) = metrics.get(name) {
            line.push_str(&format!("  {label}{}", written(*value)));
        }
    };
    add("loss ", "actor/loss", |v| format!("{v:.4}"));
    add("score ", "actor/face_score", |v| format!("{v:.4}"));
    add("success ", "env/success", |v| format!("{:.1} %", 100.0 * v));
    add("validation ", "val/env/success", |v| format!("{:.1} %", 100.0 * v));
    add("kl ", "actor/kl_loss", |v| format!("{v:.2e}"));
    add("grad norm ", "actor/grad_norm", |v| format!("{v:.3e}"));
    add("lr ", "lr", |v| format!("{v:.1e}"));
    add("", "time/total", |v| format!("{v:.1} s"));
    line
}
