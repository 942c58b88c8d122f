//! Measurements between steps: clips that are not trained on, and the algorithm's own validation.

use std::collections::BTreeMap;

use roll_core::{Error, Progress, Result, Validation, communicator};
use roll_data::write_mp4;

use super::Trainer;
use crate::checkpoint::step_name;
use crate::evaluation::{self, EvaluationInputs, PartialResults, Results};
use crate::progress::{RunSession, StoppableBar, counted};
use crate::results::record::{self, Evaluation, Skipped, ValidationMetrics};
use crate::results::{self, Journal};
use crate::run_dir::RunDir;

impl Trainer {
    /// Generates and scores the clips of `evaluation`, if there are any, and keeps the results.
    pub(super) fn evaluate(&mut self, dir: Option<&RunDir>, session: &RunSession) -> Result<Option<Results>> {
        let may_stop = self.may_stop_within_steps();
        let Some(evaluator) = &mut self.evaluator else { return Ok(None) };
        let ranks = self.strategy.ranks().all.as_ref();
        let bar = StoppableBar::begin(session, evaluator.clips() as u64, "clips", ranks.rank().0 == 0, may_stop);
        let clips = counted(evaluator.clips() as u64, "clip");
        match self.steps_done {
            0 => tracing::info!("evaluating {clips} before training"),
            step => tracing::info!("evaluating {clips} after step {step}"),
        }
        let key = evaluation::key(&self.loaded.config, &evaluator.checks(), self.model.as_mut())?;
        let moments = moments(self.steps_done, self.steps);
        let partial = dir.map(|dir| PartialResults::new(dir, self.steps_done, moments, &self.labels, key));
        let mut inputs = EvaluationInputs {
            algorithm: self.algorithm.as_mut(),
            model: self.model.as_mut(),
            reward: self.reward.as_deref_mut(),
            noise: &self.noise,
            ranks,
            progress: &bar,
        };
        let evaluated = evaluator.run(&mut inputs, partial.as_ref());
        bar.finish();
        let Some(results) = evaluated? else { return Ok(None) };
        if let (Some(dir), 0) = (dir, self.steps_done) {
            results::save_references(dir, evaluator, &self.labels)?;
        }
        if self.record.evaluations.is_empty() {
            let skipped = evaluator.skipped().iter().cloned();
            let skipped = skipped.map(|(sample, reason)| Skipped { step: self.steps_done, sample, reason });
            self.record.skipped.extend(skipped);
            self.record.skipped_samples += evaluator.skipped().len() as u64;
        }
        self.record.evaluations.push(Evaluation { step: self.steps_done, results: results.clone() });
        Ok(Some(results))
    }

    /// Writes the videos of `evaluation.prompts`. All ranks generate them, as their weights may be sharded; rank 0 writes.
    pub(super) fn write_sample_prompts(&mut self, journal: &mut Journal, session: &RunSession) -> Result<()> {
        let dir = journal.dir.as_ref();
        let may_stop = self.may_stop_within_steps();
        let Some(prompts) = &self.sample_prompts else { return Ok(()) };
        let ranks = self.strategy.ranks().all.as_ref();
        let bar = StoppableBar::begin(session, prompts.count() as u64, "prompts", ranks.rank().0 == 0, may_stop);
        tracing::info!("generating {}", counted(prompts.count() as u64, "sample prompt"));
        let moments = moments(self.steps_done, self.steps);
        let mut videos = Vec::new();
        let sampled = (0..prompts.count()).try_for_each(|i| {
            bar.set(i as u64);
            if bar.interrupted() {
                return Err(Error::Interrupted);
            }
            let video = prompts.video(i, self.model.as_mut(), &self.noise, &bar)?;
            let Some(dir) = dir else { return Ok(()) };
            moments.iter().try_for_each(|moment| write_mp4(results::prompt_path(dir, moment, i)?, &video))?;
            videos.push(video);
            Ok(())
        });
        bar.finish();
        sampled?;
        journal.write_prompts(self.steps_done, videos)
    }

    /// Runs the algorithm's validation, if it has one; returns the metrics.
    pub(super) fn validate(&mut self, journal: &mut Journal, bar: &StoppableBar) -> Result<BTreeMap<String, f64>> {
        let Some(Validation { metrics, records, losses }) = self.validation(journal.dir.as_ref(), bar)? else {
            return Ok(BTreeMap::new());
        };
        journal.write_episodes(records)?;
        self.record.validations.push(ValidationMetrics {
            step: self.steps_done,
            metrics: record::stored(&metrics),
            // JSON has no NaN, and the interval of one would say nothing.
            losses: if losses.iter().all(|loss| loss.is_finite()) { losses } else { Vec::new() },
        });
        Ok(metrics)
    }

    /// The result that an earlier process wrote, or that of the algorithm.
    fn validation(&mut self, dir: Option<&RunDir>, bar: &StoppableBar) -> Result<Option<Validation>> {
        if !self.validates {
            return self.algorithm.validate(self.steps_done, self.model.as_mut(), &self.noise, bar);
        }
        let key = evaluation::key(&self.loaded.config, &[], self.model.as_mut())?;
        let partial = dir.map(|dir| PartialResults::new(dir, self.steps_done, Vec::new(), &self.labels, key));
        let written = partial.as_ref().and_then(PartialResults::read_validation);
        // Only rank 0 has files.
        let bits = |(name, value): (&String, &f64)| (name.clone(), value.to_bits());
        let own: Option<Vec<_>> = written.as_ref().map(|validation| validation.metrics.iter().map(bits).collect());
        if let Some(metrics) = communicator::join(self.strategy.ranks().all.as_ref(), &own)?.swap_remove(0) {
            let metrics = metrics.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
            let (records, losses) = written.map(|v| (v.records, v.losses)).unwrap_or_default();
            return Ok(Some(Validation { metrics, records, losses }));
        }
        let validation = self.algorithm.validate(self.steps_done, self.model.as_mut(), &self.noise, bar)?;
        if let (Some(partial), Some(validation)) = (&partial, &validation) {
            partial.write_validation(validation)?;
        }
        Ok(validation)
    }
}

/// The folders of `samples` for clips after `step` of `steps`.
fn moments(step: u64, steps: u64) -> Vec<String> {
    match (step, step == steps) {
        (0, _) => vec!["before".into()],
        (step, true) => vec!["after".into(), step_name(step)],
        (step, false) => vec![step_name(step)],
    }
}
