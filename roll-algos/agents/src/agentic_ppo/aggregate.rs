//! Reduces a loss per token to one number.
//!
//! Every mode is linear in the losses, so that a grid of weights describes it: the value is the sum of losses times
//! weights, and the weights are the gradient of that value in the losses.

use super::grid::{Grid, Mask};

/// Reduction of the losses of tokens to one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// Every response token weighs the same.
    TokenMean,
    /// As ROLL implements `token-mean`, for repeating its runs: it sums over all tokens, also those that are filtered
    /// out, and divides by the number of response tokens.
    TokenMeanUnmasked,
    /// Sum over the tokens of a sample, mean over samples.
    SeqMeanTokenSum,
    /// Mean over the tokens of a sample, mean over samples.
    #[default]
    SeqMeanTokenMean,
    /// Sum over everything, divided by one fixed length (Dr. GRPO, <https://arxiv.org/abs/2503.20783>).
    SeqMeanTokenSumNorm,
}

/// Divisors of the sums. They are counts of the whole optimizer step, so that the results of its micro-batches add up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Totals {
    /// Response tokens.
    pub tokens: f64,
    /// Samples: all samples, or the samples with a response token, by the constructor.
    pub samples: f64,
    /// The fixed length of [`Aggregation::SeqMeanTokenSumNorm`].
    pub length: f64,
}

impl Totals {
    /// The counts of one batch: tokens of the mask, all rows, and the width.
    pub fn of_rows(mask: &Mask) -> Self {
        Self { tokens: mask.count() as f64, samples: mask.rows() as f64, length: mask.columns() as f64 }
    }

    /// As [`Totals::of_rows`], but counts only rows with a response token as samples.
    pub fn of_responses(mask: &Mask) -> Self {
        Self { samples: mask.rows_with_any() as f64, ..Self::of_rows(mask) }
    }
}

impl Aggregation {
    /// The weight of each token.
    pub fn weights(self, mask: &Mask, totals: Totals) -> Grid {
        let mut weights = Grid::filled(mask.rows(), mask.columns(), 0.0);
        for (b, count) in mask.row_counts().into_iter().enumerate() {
            // If a count is 0, so is the sum. A divisor of 1 keeps the quotient 0 instead of NaN.
            let divisor = match self {
                Self::TokenMean | Self::TokenMeanUnmasked => totals.tokens.max(1.0),
                Self::SeqMeanTokenSum => totals.samples.max(1.0),
                Self::SeqMeanTokenMean => totals.samples.max(1.0) * count.max(1) as f64,
                Self::SeqMeanTokenSumNorm => totals.length.max(1.0),
            };
            for (weight, kept) in weights.row_mut(b).iter_mut().zip(mask.row(b)) {
                *weight = if *kept || self == Self::TokenMeanUnmasked { 1.0 / divisor } else { 0.0 };
            }
        }
        weights
    }

    /// Reduces `values` to one number.
    pub fn of(self, values: &Grid, mask: &Mask, totals: Totals) -> f64 {
        self.weights(mask, totals).dot(values)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MODES: [Aggregation; 5] = [
        Aggregation::TokenMean,
        Aggregation::TokenMeanUnmasked,
        Aggregation::SeqMeanTokenSum,
        Aggregation::SeqMeanTokenMean,
        Aggregation::SeqMeanTokenSumNorm,
    ];

    #[test]
    fn a_batch_without_any_response_is_finite() {
        let values = Grid::filled(2, 3, 0.0);
        let mask = Mask::new(3, vec![false; 6]).unwrap();
        for mode in MODES {
            assert_eq!(mode.of(&values, &mask, Totals::of_responses(&mask)), 0.0, "{mode:?}");
        }
    }

    #[test]
    fn micro_batches_add_up_to_their_batch() {
        let values = Grid::new(2, vec![1.0, 2.0, -3.0, 4.0]).unwrap();
        let mask = Mask::new(2, vec![true, true, false, true]).unwrap();
        let totals = Totals::of_responses(&mask);
        let part = |b: usize| {
            let (values, mask) = (values.row(b).to_vec(), mask.row(b).to_vec());
            (Grid::new(2, values).unwrap(), Mask::new(2, mask).unwrap())
        };
        for mode in MODES {
            let whole = mode.of(&values, &mask, totals);
            let parts: f64 = (0..2).map(|b| mode.of(&part(b).0, &part(b).1, totals)).sum();
            assert!((whole - parts).abs() < 1e-12, "{mode:?}");
        }
    }
}
