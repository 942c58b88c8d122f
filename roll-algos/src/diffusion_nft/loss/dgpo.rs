//! The loss of DGPO (arXiv:2510.08425): a preference for the better videos of a group over the worse ones.
//!
//! The K videos of a group share noise and level; d is the loss of flow matching of one of them, `d_ref` that of a
//! reference policy. `S = beta / K sum A (d - d_ref)` over the group, `w = sigmoid(S)` without a gradient,
//! `L = w A d` per video. The sum over a group of the gradients of L is that of `-K / beta ln(sigmoid(-S))`.

use serde::{Deserialize, Serialize};

use super::{Noised, ValueAndGradient};
use crate::policy_gradient::clip::ClipRange;

/// The policy that a group's predictions are compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PreferenceReference {
    /// The policy that the KL compares with.
    #[default]
    KlReference,
    /// The old policy.
    Old,
}

/// The numbers of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dgpo {
    /// beta.
    pub scale: f64,
    /// K, also where some videos of the group are missing.
    pub group_size: usize,
    /// Range of the ratio `exp(d_old - d)`.
    pub clip: ClipRange,
}

/// The loss of one video with its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct DgpoTerm {
    /// `exp(d_old - d)`.
    pub ratio: f64,
    /// Whether the ratio is out of range on the side of the advantage: the video then has no gradient.
    pub is_clipped: bool,
    /// The loss.
    pub loss: ValueAndGradient,
}

impl Dgpo {
    /// A video's part of S. `distances` are d and `d_ref`.
    pub fn part(&self, advantage: f64, distances: [f64; 2]) -> f64 {
        self.scale * advantage * (distances[0] - distances[1]) / self.group_size as f64
    }

    /// The loss of a video whose group has the weight w.
    pub fn at(&self, weight: f64, advantage: f64, at: &Noised<'_>) -> DgpoTerm {
        let [d, old] = [at.velocity, at.old].map(|velocity| at.matching(velocity));
        let ratio = (old - d).exp();
        let is_clipped = if advantage > 0.0 { self.clip.is_above(ratio) } else { self.clip.is_below(ratio) };
        let slope = if is_clipped { 0.0 } else { weight * advantage };
        let loss = ValueAndGradient { value: weight * advantage * d, gradient: at.matching_gradient(slope) };
        DgpoTerm { ratio, is_clipped, loss }
    }
}

/// w of a group with this S.
pub fn group_weight(sum: f64) -> f64 {
    1.0 / (1.0 + (-sum).exp())
}
