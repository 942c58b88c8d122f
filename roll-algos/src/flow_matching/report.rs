//! Sums of a step over its draws, and the metrics that come of them.

use std::collections::BTreeMap;

use roll_core::{Communicator, Result, Sample, Sigma, SigmaRange, StepReport, StrategyReport, Video, communicator};
use serde::{Deserialize, Serialize};

/// Parts of the noise range whose losses are shown apart: the loss at one level says little about another.
const PARTS: usize = 4;

/// Sums over a step.
pub(super) struct Tally {
    range: SigmaRange,
    /// Samples that were drawn from.
    pub(super) samples: usize,
    /// Sum of their weighted losses.
    loss: f64,
    /// Sum and number of the unweighted losses of each part.
    parts: [(f64, u32); PARTS],
    skipped: Vec<(String, String)>,
    /// Name and value of a number that was not finite.
    pub(super) nonfinite: Option<(String, f64)>,
    pub(super) videos: Vec<(String, Video)>,
}

impl Tally {
    pub(super) fn new(range: SigmaRange) -> Self {
        Self {
            range,
            samples: 0,
            loss: 0.0,
            parts: [(0.0, 0); PARTS],
            skipped: Vec::new(),
            nonfinite: None,
            videos: Vec::new(),
        }
    }

    /// Counts one draw.
    pub(super) fn see(&mut self, sigma: Sigma, loss: f64, weight: f64) {
        self.loss += weight * loss;
        let SigmaRange { low, high } = self.range;
        let part = ((sigma.0 - low.0) / (high.0 - low.0) * PARTS as f64) as usize;
        let (sum, count) = &mut self.parts[part.min(PARTS - 1)];
        *sum += loss;
        *count += 1;
    }

    pub(super) fn skip(&mut self, sample: &Sample, reason: &str) {
        tracing::debug!(sample = %sample.origin, reason, "the sample is skipped");
        self.skipped.push((sample.origin.clone(), reason.into()));
    }

    /// Adds up the tallies of all ranks. Videos stay on their rank.
    pub(super) fn joined(self, ranks: &dyn Communicator) -> Result<Self> {
        if ranks.world_size() == 1 {
            return Ok(self);
        }
        let own = Share {
            samples: self.samples,
            loss: self.loss,
            parts: self.parts,
            skipped: self.skipped,
            nonfinite: self.nonfinite.map(|(what, value)| (what, value.to_bits())),
        };
        let mut all = Self { videos: self.videos, ..Self::new(self.range) };
        for share in communicator::join(ranks, &own)? {
            all.samples += share.samples;
            all.loss += share.loss;
            for ((sum, count), (more, further)) in all.parts.iter_mut().zip(share.parts) {
                *sum += more;
                *count += further;
            }
            all.skipped.extend(share.skipped);
            all.nonfinite = all.nonfinite.or(share.nonfinite.map(|(what, bits)| (what, f64::from_bits(bits))));
        }
        Ok(all)
    }

    /// Means over the samples: `actor/loss`, and `loss/0.225-0.450` for the noise levels between.
    pub(super) fn report(
        self,
        update: Option<StrategyReport>,
        learning_rate: f64,
        seconds: BTreeMap<&'static str, f64>,
    ) -> StepReport {
        let n = self.samples as f64;
        let mut metrics: BTreeMap<String, f64> = seconds.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
        metrics.insert("lr".into(), learning_rate);
        metrics.insert("actor/samples".into(), n);
        metrics.insert("actor/skipped".into(), self.skipped.len() as f64);
        if n > 0.0 && self.nonfinite.is_none() {
            metrics.insert("actor/loss".into(), self.loss / n);
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
        StepReport { metrics, skipped: self.skipped, videos: self.videos, records: Vec::new(), applied }
    }
}

/// A rank's message to the others on a step.
#[derive(Serialize, Deserialize)]
struct Share {
    samples: usize,
    loss: f64,
    parts: [(f64, u32); PARTS],
    skipped: Vec<(String, String)>,
    nonfinite: Option<(String, u64)>,
}
