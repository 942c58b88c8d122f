//! The clipped policy loss of PPO (Schulman et al. 2017), for one sample.

use roll_core::{Error, Result};

/// The range that a ratio of probabilities is clipped to: `1 - low` to `1 + high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipRange {
    /// Width of the range below 1.
    pub low: f64,
    /// Width of the range above 1.
    pub high: f64,
}

/// A sample's part of a policy loss, before the mean over samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyTerm {
    /// The loss.
    pub loss: f64,
    /// The ratio that was clipped: probability under the policy in training divided by probability under the old
    /// policy, normalised if the loss normalises it.
    pub ratio: f64,
    /// d loss / d log-probability.
    pub d_log_prob: f64,
}

impl ClipRange {
    /// The range `1 - range` to `1 + range`. Fails unless `range` is above 0 and at most 1.
    pub fn symmetric(range: f64) -> Result<Self> {
        Self::new(range, range)
    }

    /// Fails unless both sides are above 0 and the lower one is at most 1.
    pub fn new(low: f64, high: f64) -> Result<Self> {
        let is_valid = low.is_finite() && high.is_finite() && low > 0.0 && low <= 1.0 && high > 0.0;
        let problem = || {
            let found = format!("found {low} below and {high} above");
            Error::config("clip_range", format!("must be above 0, and at most 1 below; {found}"))
        };
        if is_valid { Ok(Self { low, high }) } else { Err(problem()) }
    }

    /// Whether a ratio is out of range.
    pub fn is_out(&self, ratio: f64) -> bool {
        self.is_above(ratio) || self.is_below(ratio)
    }

    /// Whether a ratio is above the range.
    pub fn is_above(&self, ratio: f64) -> bool {
        ratio - 1.0 > self.high
    }

    /// Whether a ratio is below the range.
    pub fn is_below(&self, ratio: f64) -> bool {
        1.0 - ratio > self.low
    }
}

/// `max(-A r, -A clip(r))` with r = e^`log_ratio`.
pub fn clipped(log_ratio: f64, advantage: f64, range: ClipRange) -> PolicyTerm {
    let ratio = log_ratio.exp();
    let unclipped = -advantage * ratio;
    let clipped = -advantage * ratio.clamp(1.0 - range.low, 1.0 + range.high);
    // Within the range both losses are equal. Outside, the gradient passes only if the unclipped loss is the larger
    // one.
    let has_gradient = unclipped > clipped || !range.is_out(ratio);
    // d ratio / d log-probability is the ratio, so the slope of the unclipped loss is the loss itself.
    PolicyTerm { loss: unclipped.max(clipped), ratio, d_log_prob: if has_gradient { unclipped } else { 0.0 } }
}

/// The advantage, clamped to `-bound..=bound`; NaN stays NaN.
pub fn bounded(advantage: f64, bound: f64) -> f64 {
    advantage.clamp(-bound, bound)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn clipped_loss_gradient_matches_finite_differences() {
        let range = ClipRange::new(0.1, 0.2).unwrap();
        for advantage in [1.5, -0.7] {
            for log_ratio in [-0.5, -0.05, 0.0, 0.1, 0.5] {
                let at = |x: f64| clipped(x, advantage, range).loss;
                let quotient = (at(log_ratio + 1e-6) - at(log_ratio - 1e-6)) / 2e-6;
                let slope = clipped(log_ratio, advantage, range).d_log_prob;
                assert!((quotient - slope).abs() < 1e-8, "{advantage} {log_ratio}: {quotient} {slope}");
            }
        }
        assert_eq!(clipped(0.5, 1.0, range).d_log_prob, 0.0);
        assert_eq!(clipped(-0.5, -1.0, range).d_log_prob, 0.0);
        assert!(clipped(-0.5, 1.0, range).d_log_prob < 0.0);
    }

    #[test]
    fn invalid_clip_ranges_are_errors() {
        for [low, high] in [[0.0, 0.1], [0.1, 0.0], [-1.0, 0.1], [1.5, 0.1], [f64::NAN, 0.1], [0.1, f64::INFINITY]] {
            assert!(ClipRange::new(low, high).is_err(), "{low} {high}");
        }
    }
}
