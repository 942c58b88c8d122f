//! What rank 0 writes while a run goes on: configuration, metrics, sample videos.

use std::collections::BTreeMap;

use crate::config::Loaded;
use crate::metrics::MetricsWriter;
use crate::run_dir::RunDir;
use roll_core::{Headline, Result, StepReport};
use roll_data::{encode_gif, write_mp4};

use super::record::{self, Record};
use super::trajectories::Trajectories;
use super::{SetLabels, headlines, outcome};

/// Longer side of the pictures in TensorBoard, in pixels.
const GIF_SIDE: usize = 256;

/// Opened by the first step that is done: a mistake that shows before it leaves nothing behind.
pub(crate) struct Journal {
    /// Only rank 0 has one.
    pub(crate) dir: Option<RunDir>,
    metrics: Option<MetricsWriter>,
    trajectories: Trajectories,
    /// Episodes from before the first step is done.
    early: Vec<serde_json::Value>,
    /// Steps done before this process.
    before: u64,
    headlines: Vec<Headline>,
}

impl Journal {
    pub(crate) fn new(dir: Option<&RunDir>, before: u64, headlines: Vec<Headline>) -> Self {
        Self {
            dir: dir.cloned(),
            metrics: None,
            trajectories: Trajectories::new(dir),
            early: Vec::new(),
            before,
            headlines,
        }
    }

    /// Writes the configuration and opens the metrics, which then hold the steps before this process and no others.
    pub(crate) fn open(&mut self, loaded: &Loaded, record: &Record, labels: &SetLabels) -> Result<()> {
        let (Some(dir), None) = (&self.dir, &self.metrics) else { return Ok(()) };
        dir.write_config(&loaded.resolved_yaml()?)?;
        headlines::write(dir, &self.headlines)?;
        let first = if self.before == 0 { 0 } else { self.before + 1 };
        // The step at which the process before stopped was not logged if it stopped before its evaluation.
        let first = first - u64::from(self.before > 0 && record.pending.is_some());
        let metrics = self.metrics.insert(MetricsWriter::create(dir.path(), first)?);
        let mut found = BTreeMap::new();
        for evaluation in record.evaluations.iter().filter(|e| e.step == 0) {
            found.extend(outcome::metrics(&evaluation.results, labels));
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
    pub(crate) fn keep(&mut self, episodes: Vec<serde_json::Value>) -> Result<()> {
        match self.metrics {
            Some(_) => self.trajectories.write(&episodes),
            None => {
                self.early.extend(episodes);
                Ok(())
            }
        }
    }

    /// Tells what was left out, and writes the videos of a step.
    pub(crate) fn tell(&mut self, step: u64, report: &StepReport) -> Result<()> {
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
    pub(crate) fn log(&mut self, step: u64, steps: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        let Some(writer) = &mut self.metrics else { return Ok(()) };
        writer.log(step, metrics)?;
        tracing::info!("{}", line(step, steps, metrics, &self.headlines));
        Ok(())
    }

    /// Makes the metrics last over a power cut.
    pub(crate) fn sync(&mut self) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), MetricsWriter::sync)
    }
}

/// One line for people: the headline metrics that the step has, learning rate and seconds.
fn line(step: u64, steps: u64, metrics: &BTreeMap<String, f64>, headlines: &[Headline]) -> String {
    let mut line = format!("step {step}/{steps}");
    let mut add = |label: &str, metric: &str, write: &dyn Fn(f64) -> String| {
        if let Some(value) = metrics.get(metric) {
            line.push_str(&format!("  {label}{}", write(*value)));
        }
    };
    for headline in headlines.iter().filter(|headline| !headline.label.is_empty()) {
        let write = |value| headline.format.write(value);
        add(&format!("{} ", headline.label), &headline.metric, &write);
        if let Some(held_out) = &headline.held_out {
            add(&format!("validation {} ", held_out.label), &held_out.metric, &write);
        }
    }
    add("lr ", "lr", &|v| format!("{v:.1e}"));
    add("", "time/total", &|v| format!("{v:.1} s"));
    line
}
