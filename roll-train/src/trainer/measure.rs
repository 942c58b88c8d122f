//! What is measured between steps: clips that are not trained on, and what the algorithm itself calls validation.

use std::collections::BTreeMap;

use roll_core::{Result, Validation};

use super::Trainer;
use crate::checkpoint::step_name;
use crate::evaluation::{self, Results};
use crate::progress::{Session, Watch};
use crate::results::record::{self, Evaluation, Skipped, Validated};
use crate::results::{self, Journal};
use crate::run_dir::RunDir;

impl Trainer {
    /// Generates and scores the clips of `evaluation`, if there are any, and keeps what came of it.
    pub(super) fn evaluate(&mut self, dir: Option<&RunDir>, session: &Session) -> Result<Option<Results>> {
        let may_stop = self.may_stop_within_steps();
        let Some(evaluator) = &mut self.evaluator else { return Ok(None) };
        match self.done {
            0 => tracing::info!("evaluating {} clips before training", evaluator.clips()),
            step => tracing::info!("evaluating {} clips after step {step}", evaluator.clips()),
        }
        let ranks = self.strategy.communicator();
        let bar = Watch::begin(session, evaluator.clips() as u64, "clips", ranks.rank().0 == 0, may_stop);
        let reward = self.reward.as_deref_mut();
        let generated =
            evaluator.run(self.algorithm.as_mut(), self.model.as_mut(), reward, &self.noise, &bar, ranks)?;
        bar.finish();
        let Some(generated) = generated else { return Ok(None) };
        let results = evaluation::results(&generated);
        if let Some(dir) = dir {
            let moments = match (self.done, self.done == self.steps) {
                (0, _) => vec!["before".to_string()],
                (step, true) => vec!["after".into(), step_name(step)],
                (step, false) => vec![step_name(step)],
            };
            for moment in moments {
                results::save_clips(dir, &moment, &generated, &self.labels)?;
            }
            if self.done == 0 {
                results::save_references(dir, evaluator, &self.labels)?;
            }
        }
        if self.record.evaluations.is_empty() {
            let skipped = evaluator.skipped().iter();
            let named = skipped.map(|(sample, reason)| (sample.clone(), reason.clone()));
            let named = named.map(|(sample, reason)| Skipped { step: self.done, sample, reason });
            self.record.skipped.extend(named);
            self.record.skipped_samples += evaluator.skipped().len() as u64;
        }
        self.record.evaluations.push(Evaluation { step: self.done, results: results.clone() });
        Ok(Some(results))
    }

    /// Lets the model do what it is trained for, if the algorithm has such a notion; returns the metrics.
    pub(super) fn validate(&mut self, journal: &mut Journal, bar: &Watch) -> Result<BTreeMap<String, f64>> {
        let found = self.algorithm.validate(self.done, self.model.as_mut(), &self.noise, bar)?;
        let Some(Validation { metrics, records }) = found else { return Ok(BTreeMap::new()) };
        journal.keep(records)?;
        self.record.validations.push(Validated { step: self.done, metrics: record::stored(&metrics) });
        Ok(metrics)
    }
}
