//! Measurements between steps: evaluated clips, and videos of sample prompts.

use roll_core::{Error, Progress, Result};
use roll_media::write_clip;
use roll_train::checkpoint::step_name;
use roll_train::progress::{StoppableBar, counted};
use roll_train::results::SetLabels;
use roll_train::results::record::{Evaluation, Skipped};
use roll_train::results::scores::{Results, SetName};
use roll_train::run_dir::RunDir;
use roll_train::task::{self, TaskContext};

use super::evaluation::{EvaluationInputs, Evaluator, PartialClips};
use super::{ClipTask, HeldOut, samples};

impl ClipTask {
    /// Generates and scores the clips of `evaluation`, if there are any, and keeps the results.
    pub(super) fn evaluate(&mut self, context: &mut TaskContext<'_>) -> Result<Option<Results>> {
        let HeldOut::Evaluated(evaluator) = &mut self.held_out else { return Ok(None) };
        let (step, labels, dir) = (context.step, &self.facts.labels, context.journal.dir.as_ref());
        let bar = begin_bar(context, evaluator.clips(), "clips");
        let clips = counted(evaluator.clips() as u64, "clip");
        match step {
            0 => tracing::info!("evaluating {clips} before training"),
            step => tracing::info!("evaluating {clips} after step {step}"),
        }
        let key = task::key(context.config, &evaluator.checks(), context.model)?;
        let moments = moment_names(step, self.facts.steps);
        let partial = dir.map(|dir| PartialClips::new(dir, step, moments, labels, key));
        let mut inputs = EvaluationInputs {
            algorithm: self.algorithm.as_mut(),
            model: context.model,
            reward: self.reward.as_deref_mut(),
            noise: context.noise,
            ranks: context.ranks,
            progress: &bar,
        };
        let evaluated = evaluator.run(&mut inputs, partial.as_ref());
        bar.finish();
        let Some(results) = evaluated? else { return Ok(None) };
        if let (Some(dir), 0) = (dir, step) {
            save_references(dir, evaluator, labels)?;
        }
        // Each evaluation leaves out the same clips, so only the first evaluation records them.
        if context.record.evaluations.is_empty() {
            let skipped = evaluator.skipped().iter().cloned();
            let skipped = skipped.map(|(sample, reason)| Skipped { step, sample, reason });
            context.record.skipped.extend(skipped);
            context.record.skipped_samples += evaluator.skipped().len() as u64;
        }
        context.record.evaluations.push(Evaluation { step, results: results.clone() });
        Ok(Some(results))
    }

    /// Writes the videos of `evaluation.prompts`. All ranks generate them, because weights may be sharded; rank 0
    /// writes them.
    pub(super) fn write_sample_prompts(&self, context: &mut TaskContext<'_>) -> Result<()> {
        let Some(prompts) = &self.prompts else { return Ok(()) };
        let dir = context.journal.dir.as_ref();
        let bar = begin_bar(context, prompts.count(), "prompts");
        tracing::info!("generating {}", counted(prompts.count() as u64, "sample prompt"));
        let moments = moment_names(context.step, self.facts.steps);
        let mut videos = Vec::new();
        let sampled = (0..prompts.count()).try_for_each(|i| {
            bar.set(i as u64);
            if bar.interrupted() {
                return Err(Error::Interrupted);
            }
            let video = prompts.video(i, context.model, context.noise, &bar)?;
            let Some(dir) = dir else { return Ok(()) };
            for moment in &moments {
                write_clip(&samples::prompt_stem(dir, moment, i)?, &video)?;
            }
            videos.push(video);
            Ok(())
        });
        bar.finish();
        sampled?;
        context.journal.write_prompts(context.step, videos)
    }
}

/// Copies the clips of the newest evaluation, of a run that ends early, to `samples/after`.
pub(super) fn keep_newest_as_last(context: &TaskContext<'_>) -> Result<()> {
    match (&context.journal.dir, context.record.evaluations.last()) {
        (Some(dir), Some(newest)) => samples::copy_samples(dir, &step_name(newest.step), "after"),
        _ => Ok(()),
    }
}

/// A bar for `total` clips. A single process may stop within an evaluation; several processes must stop at the same
/// point.
fn begin_bar(context: &TaskContext<'_>, total: usize, unit: &str) -> StoppableBar {
    let is_shown = context.ranks.rank().0 == 0;
    let may_stop_anywhere = context.ranks.world_size() == 1;
    StoppableBar::begin(context.session, total as u64, unit, is_shown, may_stop_anywhere)
}

/// The folders of `samples` for clips after `step` of `steps`.
fn moment_names(step: u64, steps: u64) -> Vec<String> {
    match (step, step == steps) {
        (0, _) => vec!["before".into()],
        (step, true) => vec!["after".into(), step_name(step)],
        (step, false) => vec![step_name(step)],
    }
}

/// Writes the clips of the data set to `samples/reference`.
fn save_references(dir: &RunDir, evaluator: &Evaluator, labels: &SetLabels) -> Result<()> {
    for name in [SetName::Train, SetName::Unseen] {
        for (i, sample) in evaluator.samples(name).iter().enumerate() {
            if let Some(clip) = sample.video.clip() {
                write_clip(&samples::clip_stem(dir, "reference", name, i, labels)?, clip)?;
            }
        }
    }
    Ok(())
}
