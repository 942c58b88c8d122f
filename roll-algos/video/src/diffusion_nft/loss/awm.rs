//! The loss of Advantage Weighted Matching (arXiv:2509.25050): the loss of flow matching takes the place of minus the
//! log-probability in a clipped policy loss.

use serde::{Deserialize, Serialize};

use super::Noised;
use crate::policy_gradient::clip::{ClipRange, PolicyTerm, clipped};

/// The proxy of a sample's log-probability, where m is the flow-matching loss at the noise level t.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Matching {
    /// `-m`.
    Uniform,
    /// `-t m`.
    T,
    /// `-t^2 m`.
    TSquared,
    /// `-t (sqrt(m + 1e-10) - 1e-5)`.
    Huber,
    /// `-(t / p) ((m + 1e-10)^p - 1e-10^p)` with p = 1/4.
    #[default]
    Ghuber,
}

/// Added to m under a root, so that the slope is finite at m = 0.
const SMOOTH: f64 = 1e-10;
/// The power of [`Matching::Ghuber`].
pub const GHUBER_POWER: f64 = 0.25;

impl Matching {
    /// Returns `[log-probability, d log-probability / d m]`. `power` is the p of [`Matching::Ghuber`].
    pub fn log_prob(self, m: f64, t: f64, power: f64) -> [f64; 2] {
        match self {
            Self::Uniform => [-m, -1.0],
            Self::T => [-t * m, -t],
            Self::TSquared => [-t * t * m, -t * t],
            Self::Huber => {
                let root = (m + SMOOTH).sqrt();
                [-t * (root - SMOOTH.sqrt()), -t / (2.0 * root)]
            }
            Self::Ghuber => {
                let raised = (m + SMOOTH).powf(power);
                [-(t / power) * (raised - SMOOTH.powf(power)), -t * raised / (m + SMOOTH)]
            }
        }
    }
}

/// The loss of one sample at one noise level, with its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct AwmTerm {
    /// Log-probabilities under the policy in training and under the old policy.
    pub log_probs: [f64; 2],
    /// The clipped policy loss.
    pub term: PolicyTerm,
    /// d loss / d velocity.
    pub gradient: Vec<f64>,
}

/// The clipped loss of a sample at a noise level. `power` is the p of [`Matching::Ghuber`].
pub fn at_level(matching: Matching, power: f64, advantage: f64, range: ClipRange, noised: &Noised<'_>) -> AwmTerm {
    let log_prob = |velocity: &[f32]| matching.log_prob(noised.flow_matching_loss(velocity), noised.t, power);
    let [new, slope] = log_prob(noised.velocity);
    let [old, _] = log_prob(noised.old);
    let term = clipped(new - old, advantage, range);
    AwmTerm { log_probs: [new, old], term, gradient: noised.flow_matching_gradient(term.d_log_prob * slope) }
}
