//! The files that rank 0 writes during a run: configuration, headline metrics, metrics, trajectories, sample videos.
//!
//! All files but the configuration are opened by [`Journal::open`], when the first step of a process is done, so that a
//! run that fails in its first step leaves no metrics. Earlier episodes and videos are kept in memory until then.

use std::collections::BTreeMap;

use crate::checkpoint::step_name;
use crate::config::LoadedConfig;
use crate::metrics::MetricsWriter;
use crate::run_dir::RunDir;
use roll_core::{Headline, Result, StepReport, Video};
use roll_media::{encode_gif, write_clip};

use super::labels::SetLabels;
use super::record::{self, Record};
use super::trajectories::Trajectories;
use super::{figures, headlines, progress_file, samples};

/// Length of the longer side of the videos in TensorBoard, in pixels.
const GIF_SIDE: usize = 256;

/// The open files of a run, and what is kept for them until the first step is done.
pub struct Journal {
    /// The run directory; `None` on all ranks but 0.
    pub dir: Option<RunDir>,
    /// `None` until the journal is open.
    metrics: Option<MetricsWriter>,
    trajectories: Trajectories,
    /// Episodes that are written when the journal opens.
    kept_episodes: Vec<serde_json::Value>,
    /// Videos of prompts that are written when the journal opens.
    kept_prompts: Vec<Video>,
    /// Number of steps that earlier processes took.
    earlier_steps: u64,
    headlines: Vec<Headline>,
    labels: SetLabels,
}

impl Journal {
    /// A journal that is not open yet. `earlier_steps` is the number of steps that earlier processes took.
    pub(crate) fn new(dir: Option<&RunDir>, earlier_steps: u64, headlines: Vec<Headline>, labels: SetLabels) -> Self {
        Self {
            dir: dir.cloned(),
            metrics: None,
            trajectories: Trajectories::new(dir),
            kept_episodes: Vec::new(),
            kept_prompts: Vec::new(),
            earlier_steps,
            headlines,
            labels,
        }
    }

    /// Writes the configuration if the run has none yet. With it, the run can be resumed even before its first
    /// checkpoint.
    pub(crate) fn begin(&self, loaded: &LoadedConfig) -> Result<()> {
        match &self.dir {
            Some(dir) if !dir.config_path().exists() => dir.write_config(&loaded.resolved_yaml()?),
            _ => Ok(()),
        }
    }

    /// Writes the configuration and opens the other files, on rank 0 and if they are not open yet. Lines of steps that
    /// an earlier process took after its last checkpoint are removed, because this process takes these steps again.
    pub(crate) fn open(&mut self, loaded: &LoadedConfig, record: &Record) -> Result<()> {
        let (Some(dir), None) = (&self.dir, &self.metrics) else { return Ok(()) };
        dir.write_config(&loaded.resolved_yaml()?)?;
        headlines::write(dir, &self.headlines)?;
        // The first step that this process logs. Step 0 is the measurement before training.
        let first_step = match (self.earlier_steps, &record.pending) {
            (0, _) => 0,
            (earlier_steps, None) => earlier_steps + 1,
            // The earlier process stopped before the evaluation after its last step, and did not log that step.
            (earlier_steps, Some(_)) => earlier_steps,
        };
        let metrics = MetricsWriter::create(dir.path(), first_step, &loaded.config)?;
        let metrics = self.metrics.insert(metrics);
        let mut before_training = BTreeMap::new();
        for evaluation in record.evaluations.iter().filter(|evaluation| evaluation.step == 0) {
            before_training.extend(figures::metrics(&evaluation.results, &self.labels));
        }
        for validation in record.validations.iter().filter(|validation| validation.step == 0) {
            before_training.extend(record::restored(&validation.metrics));
        }
        if self.earlier_steps == 0 && !before_training.is_empty() {
            metrics.log(0, &before_training)?;
        }
        show_prompts(metrics, self.earlier_steps, &std::mem::take(&mut self.kept_prompts))?;
        let is_last_step_validated = record.pending.is_none();
        self.trajectories.begin(self.earlier_steps, is_last_step_validated)?;
        self.write_progress(record)?;
        self.trajectories.write(&std::mem::take(&mut self.kept_episodes))
    }

    /// Adds episodes of an agent to `trajectories.jsonl`.
    pub(crate) fn write_episodes(&mut self, episodes: Vec<serde_json::Value>) -> Result<()> {
        match self.metrics {
            Some(_) => self.trajectories.write(&episodes),
            None => {
                self.kept_episodes.extend(episodes);
                Ok(())
            }
        }
    }

    /// Warns of samples and updates that a step left out, and writes the step's episodes and videos.
    pub(crate) fn write_report(&mut self, step: u64, report: &StepReport) -> Result<()> {
        let (Some(dir), Some(metrics)) = (&self.dir, &mut self.metrics) else { return Ok(()) };
        self.trajectories.write(&report.records)?;
        warn_of_skipped(step, report);
        for (i, (name, video)) in report.videos.iter().enumerate() {
            write_clip(&samples::folder(dir, &step_name(step))?.join(name), video)?;
            // The tag has no clip's name, so that all steps share it: TensorBoard has a slider over the steps of a tag.
            write_image(metrics, step, &format!("samples/{i}"), video)?;
        }
        Ok(())
    }

    /// Shows the videos of `evaluation.prompts` in TensorBoard. If the journal is not open yet, they are kept until
    /// then.
    pub fn write_prompts(&mut self, step: u64, videos: Vec<Video>) -> Result<()> {
        if self.dir.is_none() {
            return Ok(());
        }
        match &mut self.metrics {
            Some(metrics) => show_prompts(metrics, step, &videos),
            None => {
                self.kept_prompts = videos;
                Ok(())
            }
        }
    }

    /// Writes the metrics of step `step` of `steps`, and logs its progress line.
    pub(crate) fn log(&mut self, step: u64, steps: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        let Some(writer) = &mut self.metrics else { return Ok(()) };
        writer.log(step, metrics)?;
        tracing::info!("{}", progress_line(step, steps, metrics, &self.headlines));
        Ok(())
    }

    /// Writes `progress.json`, which a report reads until the next checkpoint.
    pub fn write_progress(&self, record: &Record) -> Result<()> {
        match &self.dir {
            Some(dir) => progress_file::write(dir, record, &self.headlines, &self.labels),
            None => Ok(()),
        }
    }

    /// Flushes the metrics to disk, so that they survive a power cut.
    pub(crate) fn sync(&mut self) -> Result<()> {
        match &mut self.metrics {
            Some(metrics) => metrics.sync(),
            None => Ok(()),
        }
    }
}

/// Logs warnings of the samples that a step left out, each with its number of times, and of an update that was not
/// applied.
fn warn_of_skipped(step: u64, report: &StepReport) {
    // Each pair of sample and reason once, in the order of the report.
    let mut counts: Vec<(&(String, String), u64)> = Vec::new();
    for sample_and_reason in &report.skipped {
        match counts.iter_mut().find(|(other, _)| *other == sample_and_reason) {
            Some((_, count)) => *count += 1,
            None => counts.push((sample_and_reason, 1)),
        }
    }
    for ((sample, reason), count) in counts {
        let times = if count > 1 { format!(" {count} times") } else { String::new() };
        tracing::warn!("step {step}: {sample} was left out{times}: {reason}");
    }
    if !report.applied {
        tracing::warn!("step {step}: nothing was updated");
    }
}

/// Shows videos of prompts in TensorBoard, with one tag for each prompt.
fn show_prompts(metrics: &mut MetricsWriter, step: u64, videos: &[Video]) -> Result<()> {
    for (i, video) in videos.iter().enumerate() {
        write_image(metrics, step, &format!("prompts/{i}"), video)?;
    }
    Ok(())
}

/// Shows a video in TensorBoard as an animated GIF.
fn write_image(metrics: &mut MetricsWriter, step: u64, tag: &str, video: &Video) -> Result<()> {
    let [_, height, width] = video.dims();
    metrics.image(step, tag, &encode_gif(video, GIF_SIDE)?, [height, width])
}

/// The progress line of a step: its headline metrics, learning rate and seconds.
fn progress_line(step: u64, steps: u64, metrics: &BTreeMap<String, f64>, headlines: &[Headline]) -> String {
    let mut parts = vec![format!("step {step}/{steps}")];
    let value = |metric: &str| metrics.get(metric).copied();
    for headline in headlines.iter().filter(|headline| !headline.label.is_empty()) {
        if let Some(value) = value(&headline.metric) {
            parts.push(format!("{} {}", headline.label, headline.format.write(value)));
        }
        if let Some(held_out) = &headline.held_out
            && let Some(value) = value(&held_out.metric)
        {
            parts.push(format!("validation {} {}", held_out.label, headline.format.write(value)));
        }
    }
    if let Some(rate) = value("lr") {
        parts.push(if rate == 0.0 { "lr 0".into() } else { format!("lr {rate:.1e}") });
    }
    if let Some(seconds) = value("time/total") {
        parts.push(format!("{seconds:.1} s"));
    }
    parts.join("  ")
}
