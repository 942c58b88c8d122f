//! The objective: normalised reward and KL divergence from a reference policy.

use roll_core::{Result, Sigma, Tensor};

use super::RewardFlConfig;
use crate::policy_gradient::LossMask;

/// A sample's loss and its partial derivatives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// `-similarity * reward_weight * reward + kl_weight * kl`, where the reward is
    /// `(score - reward_mean) / reward_std`, clamped to `-reward_clip..=reward_clip`.
    pub value: f64,
    /// d value / d score; 0 where `reward_clip` is active.
    pub d_score: f64,
    /// d value / d kl.
    pub d_kl: f64,
}

impl Loss {
    /// Computes the loss at `score` and `kl`. `similarity` is the weight of a rollout with leaps
    /// ([`super::trajectory::Trajectory::similarity`]), 1 without leaps.
    pub fn at(score: f64, kl: f64, similarity: f64, config: &RewardFlConfig) -> Self {
        let weight = similarity * config.reward_weight;
        let reward = (score - config.reward_mean) / config.reward_std;
        let bound = config.reward_clip.unwrap_or(f64::INFINITY);
        // False for NaN, so that NaN stays NaN.
        let is_clipped = reward.abs() > bound;
        let clipped = if is_clipped { bound.copysign(reward) } else { reward };
        let slope = if is_clipped { 0.0 } else { 1.0 / config.reward_std };
        Self { value: -weight * clipped + config.kl_weight * kl, d_score: -weight * slope, d_kl: config.kl_weight }
    }
}

/// Computes the KL divergence of one step, between two Gaussians of equal variance: `mean((v - u)^2 / (2 sigma^2))`,
/// and its gradient with respect to `v`. The mean is over the elements of `mask`, because the sampler replaces a known
/// first frame, whatever its velocity.
pub fn step_kl(v: &Tensor, u: &Tensor, sigma: Sigma, mask: LossMask) -> Result<(f64, Tensor)> {
    let (v, u, shape) = (v.f32s()?, u.f32s()?, v.shape());
    mask.fits("velocity", v.len())?;
    let n = mask.count() as f64;
    let variance = sigma.0 * sigma.0;
    let squares: f64 = mask.positions().map(|i| (f64::from(v[i]) - f64::from(u[i])).powi(2)).sum();
    let slope = (1.0 / (variance * n)) as f32;
    let mut gradient = vec![0.0; v.len()];
    mask.positions().for_each(|i| gradient[i] = (v[i] - u[i]) * slope);
    Ok((squares / (2.0 * variance * n), Tensor::new(gradient, shape)?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_reference() {
        let loss = Loss::at(-0.15267916, 0.03724366, 1.0, &RewardFlConfig::default());
        assert!((loss.value - 0.47016817).abs() < 1e-6);
        assert!((loss.d_score + 0.625).abs() < 1e-12);
        assert_eq!(loss.d_kl, 1.0);
    }

    #[test]
    fn beyond_the_clip_the_reward_has_no_slope() {
        let config = RewardFlConfig { reward_clip: Some(1.0), ..RewardFlConfig::default() };
        assert_eq!(Loss::at(0.9, 0.0, 1.0, &config), Loss { value: -0.1, d_score: -0.0, d_kl: 1.0 });
        assert!(Loss::at(0.6, 0.0, 1.0, &config).d_score < 0.0);
        assert!(Loss::at(f64::NAN, 0.0, 1.0, &config).value.is_nan());
    }

    #[test]
    fn kl_gradient_matches_finite_differences() {
        let u = Tensor::new(vec![0.3f32, -0.2, 0.5], [3]).unwrap();
        let at =
            |x: f32| step_kl(&Tensor::new(vec![x, 0.1, 0.4], [3]).unwrap(), &u, Sigma(0.5), LossMask::all(3)).unwrap();
        let quotient = (at(0.71).0 - at(0.69).0) / 0.02;
        assert!((quotient - f64::from(at(0.7).1.f32s().unwrap()[0])).abs() < 1e-4);
    }
}
