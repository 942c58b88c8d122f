//! Sums of a step over its draws, and the metrics derived from them.

use std::collections::BTreeMap;

use roll_core::{Communicator, Result, Sigma, SigmaRange, communicator};
use serde::{Deserialize, Serialize};

/// Number of equal parts of the range of noise levels whose losses are reported separately, because losses differ much
/// between levels.
const PARTS: usize = 4;

/// Sums over a step.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Number of samples with draws.
    pub(super) samples: usize,
    /// Sum of the weighted losses of all draws.
    loss: f64,
    /// Sum and number of the unweighted losses in each part of the range.
    parts: [(f64, u32); PARTS],
}

impl Tally {
    /// Counts one draw at a noise level within `range`.
    pub(super) fn count_draw(&mut self, range: SigmaRange, sigma: Sigma, loss: f64, weight: f64) {
        self.loss += weight * loss;
        let SigmaRange { low, high } = range;
        let part = ((sigma.0 - low.0) / (high.0 - low.0) * PARTS as f64) as usize;
        // The upper end of the range belongs to the last part.
        let (sum, count) = &mut self.parts[part.min(PARTS - 1)];
        *sum += loss;
        *count += 1;
    }

    /// Adds up the sums of all ranks, in the order of the ranks.
    pub(super) fn joined(&self, ranks: &dyn Communicator) -> Result<Self> {
        let mut all = Self::default();
        for tally in communicator::join(ranks, self)? {
            all.samples += tally.samples;
            all.loss += tally.loss;
            for ((sum, count), (rank_sum, rank_count)) in all.parts.iter_mut().zip(tally.parts) {
                *sum += rank_sum;
                *count += rank_count;
            }
        }
        Ok(all)
    }

    /// The mean loss of the samples; `None` without samples.
    pub(super) fn loss(&self) -> Option<f64> {
        (self.samples > 0).then(|| self.loss / self.samples as f64)
    }

    /// The mean loss of each part of `range` that has draws. Keys name the noise levels of the part:
    /// `loss/0.225-0.450`.
    pub(super) fn losses_by_part(&self, range: SigmaRange) -> BTreeMap<String, f64> {
        let SigmaRange { low, high } = range;
        let start = |i: usize| low.0 + (high.0 - low.0) * i as f64 / PARTS as f64;
        let mut losses = BTreeMap::new();
        for (i, (sum, count)) in self.parts.iter().enumerate() {
            if *count > 0 {
                losses.insert(format!("loss/{:.3}-{:.3}", start(i), start(i + 1)), sum / f64::from(*count));
            }
        }
        losses
    }
}
