//! Reward hacking during a run. The first suspicion (the trained reward rises while a check falls) is logged, and
//! `evaluation.stop_when` may end the run.

use roll_core::Result;

use super::Trainer;
use crate::checkpoint::step_name;
use crate::evaluation::hacking::{FALLING, Verdict};
use crate::results::record::{Evaluation, Suspicion};
use crate::results::{self, Journal};

impl Trainer {
    /// Judges the newest evaluation, and logs and records the first suspicion of a run. Returns the metric [`FALLING`],
    /// the number of checks (rewards of `evaluation.check`) that have fallen since the evaluation before training;
    /// `None` for that evaluation, and without checks.
    pub(super) fn record_suspicion(&mut self) -> Option<(String, f64)> {
        let verdict = self.verdict(self.record.evaluations.last()?)?;
        if let (Some(text), None) = (verdict.warning_if_suspect(self.steps_done), &self.record.suspicion) {
            if self.is_first_rank() {
                tracing::warn!("{text}");
            }
            self.record.suspicion = Some(Suspicion { step: self.steps_done, text });
        }
        Some((FALLING.into(), verdict.falling.len() as f64))
    }

    /// The reason to end the run before its last step, by `evaluation.stop_when`. It depends on the record alone, so
    /// that all ranks agree, and a run that was killed and resumed ends where it would have ended.
    pub(super) fn stop_reason(&self) -> Option<String> {
        let evaluations_in_a_row = self.loaded.config.evaluation.stop_when?.checks_fall as usize;
        // A step without an evaluation has nothing new to judge.
        if self.record.evaluations.last()?.step != self.steps_done {
            return None;
        }
        let newest_first = self.record.evaluations.iter().rev().take(evaluations_in_a_row);
        let verdicts: Option<Vec<Verdict>> = newest_first.map(|evaluation| self.verdict(evaluation)).collect();
        let verdicts =
            verdicts.filter(|all| all.len() == evaluations_in_a_row && all.iter().all(Verdict::is_suspect))?;
        verdicts.first()?.warning_if_suspect(self.steps_done)
    }

    /// The verdict on an evaluation, compared with the one before training; `None` for that one itself, and without
    /// checks.
    fn verdict(&self, evaluation: &Evaluation) -> Option<Verdict> {
        let checks = self.labels.checks();
        let before = self.record.evaluations.first().filter(|first| first.step < evaluation.step)?;
        (!checks.is_empty()).then(|| Verdict::of(&before.results, &evaluation.results, checks))
    }

    /// Completes a run that ends early: writes a checkpoint, and copies the clips of the newest evaluation to
    /// `samples/after`.
    pub(super) fn end_early(&mut self, journal: &mut Journal) -> Result<()> {
        // Not open yet if this process resumed a run that ends without a further step.
        journal.open(&self.loaded, &self.record, &self.labels)?;
        self.save(journal)?;
        self.add_late_measurements(journal)?;
        match (&journal.dir, self.record.evaluations.last()) {
            (Some(dir), Some(newest)) => results::copy_samples(dir, &step_name(newest.step), "after"),
            _ => Ok(()),
        }
    }

    fn is_first_rank(&self) -> bool {
        self.strategy.ranks().all.rank().0 == 0
    }
}
