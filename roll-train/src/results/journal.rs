//! Files that rank 0 writes during a run: configuration, headline metrics, metrics, trajectories, sample videos.

use std::collections::BTreeMap;

use crate::checkpoint::step_name;
use crate::config::LoadedConfig;
use crate::metrics::MetricsWriter;
use crate::run_dir::RunDir;
use roll_core::{Headline, Result, StepReport, Video};
use roll_media::{encode_gif, write_mp4};

use super::labels::SetLabels;
use super::record::{self, Record};
use super::trajectories::Trajectories;
use super::{figures, headlines, progress_file, samples};

/// Longer side of the videos in TensorBoard, in pixels.
const GIF_SIDE: usize = 256;

/// Writer of these files. All but the configuration come after the first step.
pub struct Journal {
    /// The run directory; `None` on all ranks but 0.
    pub dir: Option<RunDir>,
    metrics: Option<MetricsWriter>,
    trajectories: Trajectories,
    /// Episodes recorded before the journal opens.
    early: Vec<serde_json::Value>,
    /// Videos of prompts from before the journal opens.
    early_prompts: Vec<Video>,
    /// Number of steps that earlier processes took.
    before: u64,
    headlines: Vec<Headline>,
    labels: SetLabels,
}

impl Journal {
    pub(crate) fn new(dir: Option<&RunDir>, before: u64, headlines: Vec<Headline>, labels: SetLabels) -> Self {
        Self {
            dir: dir.cloned(),
            metrics: None,
            trajectories: Trajectories::new(dir),
            early: Vec::new(),
            early_prompts: Vec::new(),
            before,
            headlines,
            labels,
        }
    }

    /// Writes the configuration of a run that has none yet: with it the run can be resumed, if need be from its start.
    pub(crate) fn begin(&self, loaded: &LoadedConfig) -> Result<()> {
        match &self.dir {
            Some(dir) if !dir.config_path().exists() => dir.write_config(&loaded.resolved_yaml()?),
            _ => Ok(()),
        }
    }

    /// Writes the configuration and opens the metrics, which keep only the steps of earlier processes.
    pub(crate) fn open(&mut self, loaded: &LoadedConfig, record: &Record) -> Result<()> {
        let (Some(dir), None) = (&self.dir, &self.metrics) else { return Ok(()) };
        dir.write_config(&loaded.resolved_yaml()?)?;
        headlines::write(dir, &self.headlines)?;
        let first = if self.before == 0 { 0 } else { self.before + 1 };
        // An earlier process that stopped before the evaluation of its last step did not log that step.
        let first = first - u64::from(self.before > 0 && record.pending.is_some());
        let config = &loaded.config;
        let metrics = MetricsWriter::create(dir.path(), first, config)?;
        let metrics = self.metrics.insert(metrics);
        let mut before_training = BTreeMap::new();
        for evaluation in record.evaluations.iter().filter(|e| e.step == 0) {
            before_training.extend(figures::metrics(&evaluation.results, &self.labels));
        }
        for validation in record.validations.iter().filter(|v| v.step == 0) {
            before_training.extend(record::restored(&validation.metrics));
        }
        if self.before == 0 && !before_training.is_empty() {
            metrics.log(0, &before_training)?;
        }
        write_prompts(metrics, self.before, &std::mem::take(&mut self.early_prompts))?;
        self.trajectories.begin(self.before, record.pending.is_none())?;
        self.write_progress(record)?;
        self.trajectories.write(&std::mem::take(&mut self.early))
    }

    /// Adds episodes of an agent to `trajectories.jsonl`.
    pub(crate) fn write_episodes(&mut self, episodes: Vec<serde_json::Value>) -> Result<()> {
        match self.metrics {
            Some(_) => self.trajectories.write(&episodes),
            None => {
                self.early.extend(episodes);
                Ok(())
            }
        }
    }

    /// Warns of samples and updates that a step left out, and writes the step's episodes and videos.
    pub(crate) fn write_report(&mut self, step: u64, report: &StepReport) -> Result<()> {
        let (Some(dir), Some(metrics)) = (&self.dir, &mut self.metrics) else { return Ok(()) };
        self.trajectories.write(&report.records)?;
        let mut skipped: Vec<(&(String, String), u64)> = Vec::new();
        for left_out in &report.skipped {
            match skipped.iter_mut().find(|(other, _)| *other == left_out) {
                Some((_, times)) => *times += 1,
                None => skipped.push((left_out, 1)),
            }
        }
        for ((sample, reason), times) in skipped {
            let often = if times > 1 { format!(" {times} times") } else { String::new() };
            tracing::warn!("step {step}: {sample} was left out{often}: {reason}");
        }
        if !report.applied {
            tracing::warn!("step {step}: nothing was updated");
        }
        for (i, (name, video)) in report.videos.iter().enumerate() {
            write_mp4(samples::folder(dir, &step_name(step))?.join(format!("{name}.mp4")), video)?;
            // One tag for all steps, whose clips differ: TensorBoard has a slider over the steps of a tag.
            write_image(metrics, step, &format!("samples/{i}"), video)?;
        }
        Ok(())
    }

    /// Shows the videos of `evaluation.prompts` in TensorBoard, once the metrics are open. Those before training come with
    /// the first step.
    pub fn write_prompts(&mut self, step: u64, videos: Vec<Video>) -> Result<()> {
        if self.dir.is_none() {
            return Ok(());
        }
        match &mut self.metrics {
            Some(metrics) => write_prompts(metrics, step, &videos),
            None => {
                self.early_prompts = videos;
                Ok(())
            }
        }
    }

    pub(crate) fn log(&mut self, step: u64, steps: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        let Some(writer) = &mut self.metrics else { return Ok(()) };
        writer.log(step, metrics)?;
        tracing::info!("{}", progress_line(step, steps, metrics, &self.headlines));
        Ok(())
    }

    /// Writes `progress.json`, from which pages are made before the next checkpoint.
    pub fn write_progress(&self, record: &Record) -> Result<()> {
        match &self.dir {
            Some(dir) => progress_file::write(dir, record, &self.headlines, &self.labels),
            None => Ok(()),
        }
    }

    /// Flushes the metrics to disk, so that they survive a power cut.
    pub(crate) fn sync(&mut self) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), MetricsWriter::sync)
    }
}

/// One tag for each prompt.
fn write_prompts(metrics: &mut MetricsWriter, step: u64, videos: &[Video]) -> Result<()> {
    videos.iter().enumerate().try_for_each(|(i, video)| write_image(metrics, step, &format!("prompts/{i}"), video))
}

fn write_image(metrics: &mut MetricsWriter, step: u64, tag: &str, video: &Video) -> Result<()> {
    let [_, height, width] = video.dims();
    metrics.image(step, tag, &encode_gif(video, GIF_SIDE)?, [height, width])
}

/// The progress line of a step: its headline metrics, learning rate and seconds.
fn progress_line(step: u64, steps: u64, metrics: &BTreeMap<String, f64>, headlines: &[Headline]) -> String {
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
    add("lr ", "lr", &|v| if v == 0.0 { "0".into() } else { format!("{v:.1e}") });
    add("", "time/total", &|v| format!("{v:.1} s"));
    line
}
