//! Losses of one trained step of one video. They compare the step's log-probability under the policy in training with
//! that under the old policy, which sampled the step.

use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::policy_gradient::LossMask;
use crate::policy_gradient::clip::{ClipRange, PolicyTerm, clipped};

/// How the loss keeps the policy near the old one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLoss {
    /// PPO's clip of the ratio, as in Flow-GRPO.
    #[default]
    Clip,
    /// GRPO-Guard (arXiv:2510.22319): PPO's clip of a normalised ratio, which is centred at 1 and has the same scale in
    /// all steps.
    Guard,
    /// Flow-DPPO (arXiv:2606.11025): no clip. A sample is left out if its mean has moved too far in the direction of
    /// its advantage.
    Dppo,
}

/// The difference between the policy in training and the old one in one step, and the step's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyShift {
    /// Log-probability under the policy in training minus log-probability under the old policy.
    pub log_ratio: f64,
    /// The squared distance of the two policies' means, `mean((mean - mean_old)^2)`.
    pub squared: f64,
    /// Standard deviation of the step's noise.
    pub std: f64,
    /// Variance in the log-probability of the step ([`SdeStep::variance`]).
    ///
    /// [`SdeStep::variance`]: crate::policy_gradient::sde::SdeStep::variance
    pub variance: f64,
    /// h, the root of the step's length ([`SdeStep::root`]).
    ///
    /// [`SdeStep::root`]: crate::policy_gradient::sde::SdeStep::root
    pub root: f64,
}

/// A sample's part of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTerm {
    /// The loss, the ratio, and d loss / d log-probability.
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

/// The loss of [`PolicyLoss::Clip`].
pub fn clip(shift: PolicyShift, advantage: f64, range: ClipRange) -> StepTerm {
    StepTerm { term: clipped(shift.log_ratio, advantage, range), d_squared: 0.0, is_dropped: false }
}

/// The loss of [`PolicyLoss::Guard`].
///
/// For the noise z of the sampled step, the log ratio of Gaussians is `mean(z (mean - mean_old)) std / variance` minus
/// `mean((mean - mean_old)^2) / (2 variance)`. The subtrahend is a bias, and `std / variance` a scale that differs from
/// step to step. The normalised ratio has neither:
///
/// ```text
/// exp((log ratio + mean((mean - mean_old)^2) / (2 variance)) variance / std)
/// ```
///
/// The loss is divided by h^2. The gradient passes through the log ratio and through the squared distance.
pub fn guard(shift: PolicyShift, advantage: f64, range: ClipRange) -> StepTerm {
    let scale = shift.variance / shift.std;
    let bias_factor = 1.0 / (2.0 * shift.variance);
    let term = clipped((shift.log_ratio + bias_factor * shift.squared) * scale, advantage, range);
    let loss_factor = 1.0 / (shift.root * shift.root);
    let d_log_prob = loss_factor * scale * term.d_log_prob;
    StepTerm {
        term: PolicyTerm { loss: loss_factor * term.loss, ratio: term.ratio, d_log_prob },
        d_squared: bias_factor * d_log_prob,
        is_dropped: false,
    }
}

/// The loss of [`PolicyLoss::Dppo`]: `-A r`, or 0 if `divergence` is at least `threshold` and the ratio has moved in
/// the direction of the advantage.
pub fn dppo(shift: PolicyShift, advantage: f64, divergence: f64, threshold: f64) -> StepTerm {
    let ratio = shift.log_ratio.exp();
    let moved_along_advantage = (ratio > 1.0 && advantage > 0.0) || (ratio < 1.0 && advantage < 0.0);
    let is_dropped = divergence >= threshold && moved_along_advantage;
    let loss = if is_dropped { 0.0 } else { -advantage * ratio };
    let d_log_prob = loss; // the ratio, exp(log ratio), is its own derivative
    StepTerm { term: PolicyTerm { loss, ratio, d_log_prob }, d_squared: 0.0, is_dropped }
}

/// The divergence of [`dppo`] between two Gaussians of one step: `mean((mean - mean_old)^2) / (2 std^2)`.
pub fn divergence(shift: PolicyShift) -> f64 {
    shift.squared / (2.0 * shift.std * shift.std)
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
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::FlowSchedule;
    use crate::policy_gradient::sde::{SdeKind, SdeStep};

    #[test]
    fn gradients_match_finite_differences() {
        let range = ClipRange { low: 0.2, high: 0.3 };
        for (advantage, variance) in [(0.8, 0.0324), (-1.2, 0.0324), (0.8, 0.5), (-1.2, 0.5)] {
            let at = |log_ratio, squared| PolicyShift { log_ratio, squared, std: 0.18, variance, root: 0.3 };
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

    /// A step of each kind, whose mean moves by `move_by` in every element after a sample with the noise `z`.
    fn moved(kind: SdeKind, i: usize, move_by: f64, z: f32) -> (SdeStep, PolicyShift) {
        let schedule = FlowSchedule::new(12, 5.0).unwrap();
        let step = SdeStep::new(kind, 0.7, schedule.sigmas(), i).unwrap();
        let mask = LossMask::all(4);
        let old = step.mean(&[0.3, -0.2, 0.5, 0.1], &[0.7, 0.1, -0.4, 0.2]);
        let next = step.next(&old, &[z; 4]);
        let mean: Vec<f64> = old.iter().map(|mean| mean + move_by).collect();
        let log_ratio = step.log_prob(&next, &mean, mask) - step.log_prob(&next, &old, mask);
        let squared = mean_shift(&mean, &old, mask);
        let (std, variance, root) = (step.std(), step.variance(), step.root());
        (step, PolicyShift { log_ratio, squared, std, variance, root })
    }

    const KINDS: [SdeKind; 4] = [SdeKind::Sde, SdeKind::Wan, SdeKind::Dance, SdeKind::Cps];

    #[test]
    fn the_divergence_is_that_of_two_gaussians_with_the_deviation_of_the_step() {
        for kind in KINDS {
            for i in [0, 5, 10] {
                let (step, shift) = moved(kind, i, 1e-3, 0.4);
                // KL(N(mean, std) | N(old, std)) of one element.
                let expected = 1e-6 / (2.0 * step.std().powi(2));
                assert!((divergence(shift) / expected - 1.0).abs() < 1e-9, "{kind:?} {i}");
            }
        }
        // cps, first of 12 steps with shift 5: the deviation is 0.98214 sin(0.35 pi) = 0.87510.
        let (step, shift) = moved(SdeKind::Cps, 0, 1e-3, 0.4);
        assert!((step.std() - 0.875_096).abs() < 1e-6, "{}", step.std());
        assert!((divergence(shift) - 6.529_18e-7).abs() < 1e-12, "{}", divergence(shift));
    }

    #[test]
    fn the_guarded_ratio_has_neither_bias_nor_scale_of_its_step() {
        let range = ClipRange { low: 0.9, high: 9.0 };
        for kind in KINDS {
            for i in [0, 5, 10] {
                for (move_by, z) in [(0.02, 0.4), (-0.03, 0.4), (0.02, -1.1), (0.02, 0.0)] {
                    let (_, shift) = moved(kind, i, move_by, z);
                    let ratio = guard(shift, 1.0, range).term.ratio;
                    let expected = (f64::from(z) * move_by).exp();
                    assert!((ratio - expected).abs() < 1e-9, "{kind:?} {i}: {ratio} or {expected}");
                }
            }
        }
    }

    #[test]
    fn only_a_sample_that_moved_far_along_its_advantage_is_left_out() {
        let at = |log_ratio: f64, squared: f64| PolicyShift { log_ratio, squared, std: 1.0, variance: 1.0, root: 1.0 };
        let left_out = |shift, advantage| dppo(shift, advantage, divergence(shift), 1e-5).is_dropped;
        assert!(left_out(at(0.1, 1e-4), 1.0) && left_out(at(-0.1, 1e-4), -1.0));
        assert!(!left_out(at(0.1, 1e-4), -1.0) && !left_out(at(-0.1, 1e-4), 1.0));
        assert!(!left_out(at(0.1, 1e-6), 1.0));
        assert!(check_threshold(0.0).is_err() && check_threshold(f64::NAN).is_err());
    }
}
