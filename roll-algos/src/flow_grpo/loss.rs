//! Losses of a trained step of one sample, by its log-probability under the policy and under the one that sampled it.

use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::policy_gradient::LossMask;
use crate::policy_gradient::clip::{ClipRange, PolicyTerm, clipped};

/// How far the policy may move in an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLoss {
    /// PPO's clip of the ratio, as in Flow-GRPO.
    #[default]
    Clip,
    /// The clip of a ratio that is brought back around one and to one scale for all steps: GRPO-Guard
    /// (arXiv:2510.22319).
    Guard,
    /// No clip: a sample whose mean has moved too far, and along its advantage, is left out: Flow-DPPO
    /// (arXiv:2606.11025).
    Dppo,
}

/// Arguments of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyShift {
    /// Log-probability under the policy minus that under the old one.
    pub log_ratio: f64,
    /// `mean((mean - mean_old)^2)`.
    pub squared: f64,
    /// Level of noise of the step.
    pub level: f64,
    /// Root of its length.
    pub root: f64,
}

/// A sample's part of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTerm {
    /// Loss, ratio, and slope in the log-probability.
    pub term: PolicyTerm,
    /// d loss / d `squared` of [`PolicyShift`].
    pub d_squared: f64,
    /// Whether the sample was left out.
    pub is_dropped: bool,
}

/// `mean((mean - mean_old)^2)`.
pub fn mean_shift(mean: &[f64], old: &[f64], mask: LossMask) -> f64 {
    mask.mean(|i| (mean[i] - old[i]).powi(2))
}

/// The loss with a clip.
pub fn clip(shift: PolicyShift, advantage: f64, range: ClipRange) -> StepTerm {
    StepTerm { term: clipped(shift.log_ratio, advantage, range), d_squared: 0.0, is_dropped: false }
}

/// The ratio is `exp((log ratio + mean((mean - mean_old)^2) / (2 g^2 h^2)) g h)`, the loss is divided by h^2. The
/// gradient passes through both.
pub fn guard(shift: PolicyShift, advantage: f64, range: ClipRange) -> StepTerm {
    let scale = shift.level * shift.root;
    let of_squared = 1.0 / (2.0 * scale * scale);
    let term = clipped((shift.log_ratio + of_squared * shift.squared) * scale, advantage, range);
    let share = 1.0 / (shift.root * shift.root);
    let d_log_prob = share * scale * term.d_log_prob;
    StepTerm {
        term: PolicyTerm { loss: share * term.loss, ratio: term.ratio, d_log_prob },
        d_squared: of_squared * d_log_prob,
        is_dropped: false,
    }
}

/// `-A r`, or 0 where `divergence` is at least `threshold` and the ratio has moved along the advantage.
pub fn dppo(shift: PolicyShift, advantage: f64, divergence: f64, threshold: f64) -> StepTerm {
    let ratio = shift.log_ratio.exp();
    let along = (ratio > 1.0 && advantage > 0.0) || (ratio < 1.0 && advantage < 0.0);
    let is_dropped = divergence >= threshold && along;
    let loss = if is_dropped { 0.0 } else { -advantage * ratio };
    StepTerm { term: PolicyTerm { loss, ratio, d_log_prob: loss }, d_squared: 0.0, is_dropped }
}

/// The divergence of [`dppo`] between two Gaussians of one step: `mean((mean - mean_old)^2) / (2 g^2 h^2)`.
pub fn divergence(shift: PolicyShift) -> f64 {
    shift.squared / (2.0 * (shift.level * shift.root).powi(2))
}

/// Fails unless the threshold of [`dppo`] is above 0.
pub fn check_threshold(threshold: f64) -> Result<()> {
    match threshold.is_finite() && threshold > 0.0 {
        true => Ok(()),
        false => Err(Error::config("divergence_threshold", format!("must be above 0, found {threshold}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_match_finite_differences() {
        let range = ClipRange { low: 0.2, high: 0.3 };
        let at = |log_ratio: f64, squared: f64| PolicyShift { log_ratio, squared, level: 0.6, root: 0.3 };
        for advantage in [0.8, -1.2] {
            for log_ratio in [-0.4, 0.01, 0.5] {
                let losses: [&dyn Fn(PolicyShift) -> StepTerm; 3] =
                    [&|shift| clip(shift, advantage, range), &|shift| guard(shift, advantage, range), &|shift| {
                        dppo(shift, advantage, divergence(shift), 1e9)
                    }];
                for loss in losses {
                    let term = loss(at(log_ratio, 0.02));
                    let value = |log_ratio, squared| loss(at(log_ratio, squared)).term.loss;
                    let h = 1e-7;
                    let of_ratio = (value(log_ratio + h, 0.02) - value(log_ratio - h, 0.02)) / (2.0 * h);
                    let of_squared = (value(log_ratio, 0.02 + h) - value(log_ratio, 0.02 - h)) / (2.0 * h);
                    assert!((of_ratio - term.term.d_log_prob).abs() < 1e-6 * (1.0 + of_ratio.abs()));
                    assert!((of_squared - term.d_squared).abs() < 1e-6 * (1.0 + of_squared.abs()));
                }
            }
        }
    }

    #[test]
    fn only_a_sample_that_moved_far_along_its_advantage_is_left_out() {
        let at = |log_ratio: f64, squared: f64| PolicyShift { log_ratio, squared, level: 1.0, root: 1.0 };
        let left_out = |shift, advantage| dppo(shift, advantage, divergence(shift), 1e-5).is_dropped;
        assert!(left_out(at(0.1, 1e-4), 1.0) && left_out(at(-0.1, 1e-4), -1.0));
        assert!(!left_out(at(0.1, 1e-4), -1.0) && !left_out(at(-0.1, 1e-4), 1.0));
        assert!(!left_out(at(0.1, 1e-6), 1.0));
        assert!(check_threshold(0.0).is_err() && check_threshold(f64::NAN).is_err());
    }
}
