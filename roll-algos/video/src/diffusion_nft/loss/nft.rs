//! The loss of DiffusionNFT (arXiv:2509.16117): the policy in training, mixed with the old one, shall predict good
//! samples; mirrored at the old one, bad samples.
//!
//! `v+ = beta v + (1 - beta) v_old`, `v- = (1 + beta) v_old - beta v`, e+- the errors of the samples that they predict,
//! `L = bound (r mean(e+^2) / (w+ beta) + (1 - r) mean(e-^2) / (w- beta))` with weights w+- = mean |e+-| that carry no
//! gradient.

use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{Noised, ValueAndGradient};

/// Which advantages count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageMode {
    /// All, as they are.
    #[default]
    All,
    /// Advantages below 0 count as 0.
    PositiveOnly,
    /// Advantages above 0 count as 0.
    NegativeOnly,
    /// 1 above 0, and 0 otherwise.
    OneOnly,
    /// Their sign.
    Binary,
}

impl AdvantageMode {
    /// The value that an advantage counts with.
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

/// The numbers of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nft {
    /// How far the implicit policies are from the old one.
    pub beta: f64,
    /// Bound on advantages; the loss is multiplied by it.
    pub bound: f64,
    /// Which advantages count.
    pub mode: AdvantageMode,
}

/// The loss with its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct NftTerm {
    /// How good the sample is, from 0 to 1.
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
    /// Fails on numbers without a sense.
    pub fn check(&self) -> Result<()> {
        let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(Error::config(name, format!("must be above 0, found {value}"))),
        };
        positive("beta", self.beta)?;
        positive("advantage_clip", self.bound)
    }

    /// `A / bound / 2 + 1 / 2`, within 0 and 1.
    pub fn share(&self, advantage: f64) -> f64 {
        let bounded = self.mode.of(advantage.clamp(-self.bound, self.bound));
        (bounded / self.bound / 2.0 + 0.5).clamp(0.0, 1.0)
    }

    /// At one sample and noise level. beta cancels in the gradient:
    /// `bound (2 t / N) ((1 - r) e- / w- - r e+ / w+)`.
    pub fn at(&self, advantage: f64, at: &Noised<'_>) -> NftTerm {
        let &Self { beta, bound, .. } = self;
        let (v, old) = (|i: usize| f64::from(at.velocity[i]), |i: usize| f64::from(at.old[i]));
        let plus = |i: usize| beta * v(i) + (1.0 - beta) * old(i);
        let minus = |i: usize| (1.0 + beta) * old(i) - beta * v(i);
        let weights = [at.weight(plus), at.weight(minus)];
        let positive = at.mask.mean(|i| at.data_error(i, plus(i)).powi(2)) / weights[0];
        let negative = at.mask.mean(|i| at.data_error(i, minus(i)).powi(2)) / weights[1];
        let share = self.share(advantage);
        let value = bound * (share * positive + (1.0 - share) * negative) / beta;
        let slope = bound * 2.0 * at.t / at.mask.count() as f64;
        let gradient = at.mask.map(|i| {
            let (good, bad) = (at.data_error(i, plus(i)) / weights[0], at.data_error(i, minus(i)) / weights[1]);
            slope * ((1.0 - share) * bad - share * good)
        });
        NftTerm { share, positive, negative, weights, loss: ValueAndGradient { value, gradient } }
    }
}
