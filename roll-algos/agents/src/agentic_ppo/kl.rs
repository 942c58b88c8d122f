//! Estimates of the KL divergence from sampled tokens, and the controller of the coefficient of a KL penalty.

use roll_core::{Error, Result};

use super::grid::Grid;

/// Magnitude that the k3 estimate is clamped to.
const K3_BOUND: f64 = 10.0;

/// An estimate of KL(p || q) from log-probabilities of tokens drawn from p (<http://joschu.net/blog/kl-approx.html>).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimate {
    /// `log p - log q`: unbiased, of either sign.
    #[default]
    Kl,
    /// `|log p - log q|`, for files of ROLL or verl that have it.
    Abs,
    /// `(log p - log q)^2 / 2`, for files of ROLL or verl that have it.
    Mse,
    /// `q/p - 1 - log(q/p)`: unbiased and never negative; clamped to 10.
    K3,
}

impl KlEstimate {
    /// The estimate, and its derivative in `log_p`.
    pub fn at(self, log_p: f64, log_q: f64) -> (f64, f64) {
        let d = log_p - log_q;
        match self {
            Self::Kl => (d, 1.0),
            Self::Abs => (d.abs(), if d == 0.0 { 0.0 } else { d.signum() }),
            Self::Mse => (0.5 * d * d, d),
            Self::K3 => {
                let k3 = (-d).exp_m1() + d;
                if k3 > K3_BOUND { (K3_BOUND, 0.0) } else { (k3, -(-d).exp_m1()) }
            }
        }
    }

    /// The estimate of each token.
    pub fn of(self, log_p: &Grid, log_q: &Grid) -> Grid {
        log_p.zip(log_q, |p, q| self.at(p, q).0)
    }

    /// The derivative of each token's estimate in its `log_p`.
    pub fn slopes(self, log_p: &Grid, log_q: &Grid) -> Grid {
        log_p.zip(log_q, |p, q| self.at(p, q).1)
    }
}

/// The coefficient of the KL penalty in the rewards, and how it changes.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlController {
    /// A constant coefficient.
    Fixed {
        /// The coefficient.
        value: f64,
    },
    /// A coefficient under proportional control, which holds the KL at a target (<https://arxiv.org/abs/1909.08593>,
    /// section 2.2).
    Adaptive {
        /// The present coefficient.
        value: f64,
        /// The target of the KL.
        target: f64,
        /// Number of samples over which the coefficient changes by at most 20 %.
        horizon: f64,
    },
}

impl KlController {
    /// Makes an adaptive controller if there is a target, otherwise a fixed one. Fails on a target or horizon that is
    /// not positive.
    pub fn new(init_kl_coef: f64, target_kl: Option<f64>, kl_horizon: f64) -> Result<Self> {
        let positive = |key: &str, value: f64| match value {
            v if v > 0.0 && v.is_finite() => Ok(v),
            v => Err(Error::config(key, format!("expected a positive number, found {v}"))),
        };
        Ok(match target_kl {
            None => Self::Fixed { value: init_kl_coef },
            Some(target) => Self::Adaptive {
                value: init_kl_coef,
                target: positive("target_kl", target)?,
                horizon: positive("kl_horizon", kl_horizon)?,
            },
        })
    }

    /// The coefficient.
    pub fn value(&self) -> f64 {
        match self {
            Self::Fixed { value } | Self::Adaptive { value, .. } => *value,
        }
    }

    /// Updates the coefficient after `samples` samples with the mean KL `current`.
    pub fn update(&mut self, current: f64, samples: usize) {
        if let Self::Adaptive { value, target, horizon } = self
            && current.is_finite()
        {
            let error = (current / *target - 1.0).clamp(-0.2, 0.2);
            *value *= 1.0 + error * samples as f64 / *horizon;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn gradients_match_finite_differences() {
        for estimate in [KlEstimate::Kl, KlEstimate::Abs, KlEstimate::Mse, KlEstimate::K3] {
            for (p, q) in [(-1.2, -0.4), (-0.3, -2.0), (-9.0, -0.1)] {
                let quotient = (estimate.at(p + 1e-6, q).0 - estimate.at(p - 1e-6, q).0) / 2e-6;
                assert!((quotient - estimate.at(p, q).1).abs() < 1e-5, "{estimate:?} at {p}, {q}");
            }
        }
    }

    #[test]
    fn the_adaptive_coefficient_moves_against_the_error() {
        let mut controller = KlController::new(0.2, Some(1.0), 100.0).unwrap();
        controller.update(5.0, 16);
        assert!((controller.value() - 0.2064).abs() < 1e-12);
        controller.update(1.0, 16);
        assert!((controller.value() - 0.2064).abs() < 1e-12);
        controller.update(0.0, 16);
        assert!(controller.value() < 0.2064);
        controller.update(f64::NAN, 16);
        assert!(controller.value().is_finite());
        assert!(KlController::new(0.2, Some(0.0), 100.0).is_err());
    }
}
