//! The loss of DiffusionNFT (arXiv:2509.16117): the mixture v+ of the policy in training and the old policy learns to
//! predict good samples, and its mirror image v- about the old policy learns to predict bad samples.
//!
//! `v+ = beta v + (1 - beta) v_old` and `v- = (1 + beta) v_old - beta v`. Their predictions of x_0 have the errors e+
//! and e-. With r in [0, 1], which says how good the sample is ([`Nft::share`]), the loss is `L = bound (r mean(e+^2) /
//! (w+ beta) + (1 - r) mean(e-^2) / (w- beta))`. The weights w+ = mean |e+| and w- = mean |e-| are constants for the
//! gradient.

use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{Noised, ValueAndGradient};

/// The use of advantages: which of them enter the loss, and by which value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageMode {
    /// All advantages, unchanged.
    #[default]
    All,
    /// Advantages below 0 count as 0.
    PositiveOnly,
    /// Advantages above 0 count as 0.
    NegativeOnly,
    /// Advantages above 0 count as 1, others as 0.
    OneOnly,
    /// The sign of the advantage: 1, 0 or -1.
    Binary,
}

impl AdvantageMode {
    /// The value by which an advantage enters the loss.
    pub fn of(self, advantage: f64) -> f64 {
        match self {
            Self::All => advantage,
            Self::PositiveOnly => advantage.max(0.0),
            Self::NegativeOnly => advantage.min(0.0),
            Self::OneOnly => f64::from(u8::from(advantage > 0.0)),
            Self::Binary if advantage == 0.0 => 0.0,
            Self::Binary => advantage.signum(),
        }
    }
}

/// The constants of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nft {
    /// How far the implicit policies v+ and v- are from the old policy.
    pub beta: f64,
    /// Bound on advantages (`algo.advantage_clip`); also a factor of the loss.
    pub bound: f64,
    /// The use of advantages.
    pub mode: AdvantageMode,
}

/// The loss with its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct NftTerm {
    /// r: how good the sample is, from 0 to 1.
    pub share: f64,
    /// `mean(e+^2) / w+`.
    pub positive: f64,
    /// `mean(e-^2) / w-`.
    pub negative: f64,
    /// w+ and w-.
    pub weights: [f64; 2],
    /// The loss.
    pub loss: ValueAndGradient,
}

impl Nft {
    /// Fails unless `beta` and `bound` are above 0.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [("beta", self.beta), ("advantage_clip", self.bound)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::config(name, format!("must be above 0, found {value}")));
            }
        }
        Ok(())
    }

    /// r of a sample: `A / bound / 2 + 1 / 2`, clamped to [0, 1]. A is the advantage, clamped and mapped by `mode`.
    pub fn share(&self, advantage: f64) -> f64 {
        let bounded = self.mode.of(advantage.clamp(-self.bound, self.bound));
        (bounded / self.bound / 2.0 + 0.5).clamp(0.0, 1.0)
    }

    /// The loss of one sample at one noise level. beta cancels in the gradient with respect to v:
    /// `bound (2 t / N) ((1 - r) e- / w- - r e+ / w+)`.
    pub fn at(&self, advantage: f64, noised: &Noised<'_>) -> NftTerm {
        let &Self { beta, bound, .. } = self;
        let v = |i: usize| f64::from(noised.velocity[i]);
        let old = |i: usize| f64::from(noised.old[i]);
        let plus = |i: usize| beta * v(i) + (1.0 - beta) * old(i);
        let minus = |i: usize| (1.0 + beta) * old(i) - beta * v(i);
        let weights = [noised.weight(plus), noised.weight(minus)];
        let positive = noised.mask.mean(|i| noised.data_error(i, plus(i)).powi(2)) / weights[0];
        let negative = noised.mask.mean(|i| noised.data_error(i, minus(i)).powi(2)) / weights[1];
        let share = self.share(advantage);
        let value = bound * (share * positive + (1.0 - share) * negative) / beta;
        let slope = bound * 2.0 * noised.t / noised.mask.count() as f64;
        let gradient = noised.mask.map(|i| {
            let plus_error = noised.data_error(i, plus(i)) / weights[0];
            let minus_error = noised.data_error(i, minus(i)) / weights[1];
            slope * ((1.0 - share) * minus_error - share * plus_error)
        });
        NftTerm { share, positive, negative, weights, loss: ValueAndGradient { value, gradient } }
    }
}
