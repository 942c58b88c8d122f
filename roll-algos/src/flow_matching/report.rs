//! What a step adds up over its draws, and the metrics that come of it.

use std::collections::BTreeMap;

use roll_core::{Sample, Sigma, SigmaRange, StepReport, StrategyReport, Video};

/// Parts of the noise range whose losses are shown apart: the loss at one level says little about another.
const PARTS: usize = 4;

/// What became of a sample.
pub(super) enum Outcome {
    /// Mean of its weighted losses.
    Trained(f64),
    Skipped(String),
    NonFinite(String, f64),
}

/// Sums over a step.
pub(super) struct Tally {
    range: SigmaRange,
    losses: Vec<f64>,
    /// Sum and number of the unweighted losses of each part.
    parts: [(f64, u32); PARTS],
    skipped: Vec<(String, String)>,
    /// What was not finite, and its value.
    pub(super) nonfinite: Option<(String, f64)>,
    pub(super) videos: Vec<(String, Video)>,
}

impl Tally {
    pub(super) fn new(range: SigmaRange) -> Self {
        Self {
            range,
            losses: Vec::new(),
            parts: [(0.0, 0); PARTS],
            skipped: Vec::new(),
            nonfinite: None,
            videos: Vec::new(),
        }
    }

    /// Counts one draw.
    pub(super) fn see(&mut self, sigma: Sigma, loss: f64) {
        let SigmaRange { low, high } = self.range;
        let part = ((sigma.0 - low.0) / (high.0 - low.0) * PARTS as f64) as usize;
        let (sum, count) = &mut self.parts[part.min(PARTS - 1)];
        *sum += loss;
        *count += 1;
    }

    pub(super) fn add(&mut self, sample: &Sample, outcome: Outcome) {
        match outcome {
            Outcome::Trained(loss) => self.losses.push(loss),
            Outcome::NonFinite(what, value) => self.nonfinite = Some((what, value)),
            Outcome::Skipped(reason) => {
                tracing::warn!(sample = %sample.origin, reason, "the sample is skipped");
                self.skipped.push((sample.origin.clone(), reason));
            }
        }
    }

    /// Samples that gave a gradient.
    pub(super) fn trained(&self) -> usize {
        self.losses.len()
    }

    /// Means over this rank's samples: `actor/loss`, and `loss/0.225-0.450` for the noise levels between.
    pub(super) fn report(
        self,
        update: Option<StrategyReport>,
        learning_rate: f64,
        seconds: BTreeMap<&'static str, f64>,
    ) -> StepReport {
        let n = self.losses.len() as f64;
        let mut metrics: BTreeMap<String, f64> = seconds.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
        metrics.insert("lr".into(), learning_rate);
        metrics.insert("actor/samples".into(), n);
        metrics.insert("actor/skipped".into(), self.skipped.len() as f64);
        if n > 0.0 {
            metrics.insert("actor/loss".into(), self.losses.iter().sum::<f64>() / n);
        }
        let SigmaRange { low, high } = self.range;
        let end = |i: usize| low.0 + (high.0 - low.0) * i as f64 / PARTS as f64;
        for (i, (sum, count)) in self.parts.iter().enumerate().filter(|(_, (_, count))| *count > 0) {
            metrics.insert(format!("loss/{:.3}-{:.3}", end(i), end(i + 1)), sum / f64::from(*count));
        }
        if let Some(update) = &update {
            metrics.insert("actor/grad_norm".into(), update.grad_norm);
        }
        if self.nonfinite.is_some() {
            metrics.insert("actor/nonfinite".into(), 1.0);
        }
        let applied = update.is_some_and(|u| u.applied);
        StepReport { metrics, skipped: self.skipped, videos: self.videos, applied }
    }
}
