//! The loss of the critic's values, and the fraction of the variance of returns that they explain.

use crate::agentic_ppo::aggregate::{Aggregation, Totals};
use crate::agentic_ppo::grid::{Grid, Mask};

/// The loss of values and its gradient.
#[derive(Clone, Debug)]
pub struct ValueLoss {
    /// Half the mean of `(value - return)^2`, over the tokens of each sample and then over samples. With a clip, a
    /// token counts with the larger of this square and that of its clipped value.
    pub value: f64,
    /// Gradient of the loss in the values.
    pub d_values: Grid,
    /// Mean squared error, without the clip.
    pub error: f64,
    /// Fraction of tokens whose clipped value is the one that counts.
    pub clip_fraction: f64,
}

/// The loss of `values` against `returns` over `mask`. With `clip`, a value is clipped to this distance from its `old`
/// value if that makes the loss larger. The loss has no gradient in a value that is clipped
/// (<https://arxiv.org/abs/1707.06347>, as its authors implement it).
pub fn value_loss(
    values: &Grid,
    old: &Grid,
    returns: &Grid,
    mask: &Mask,
    clip: Option<f64>,
    totals: Totals,
) -> ValueLoss {
    let weights = Aggregation::SeqMeanTokenMean.weights(mask, totals);
    let error = values.zip(returns, |v, r| v - r).masked(mask);
    let squares = error.map(|e| e * e);
    let clipped_squares = match clip {
        None => squares.map(|_| f64::NEG_INFINITY),
        Some(bound) => {
            let clipped = values.zip(old, |v, o| v.clamp(o - bound, o + bound));
            clipped.zip(returns, |v, r| (v - r).powi(2)).masked(mask)
        }
    };
    // Where the square of the clipped value is larger, the value lies outside its range, so that moving it changes
    // nothing.
    let is_clipped = clipped_squares.zip(&squares, |c, s| f64::from(u8::from(c > s)));
    ValueLoss {
        value: 0.5 * weights.dot(&squares.zip(&clipped_squares, f64::max)),
        d_values: weights.weigh(&error.zip(&is_clipped, |e, d| if d > 0.0 { 0.0 } else { e })),
        error: weights.dot(&squares),
        clip_fraction: weights.dot(&is_clipped),
    }
}

/// `1 - Var(returns - values) / Var(returns)` over the mask: 1 if the critic predicts every return, 0 if it does no
/// better than a constant. `None` if all returns are equal, because then there is nothing to explain.
pub fn explained_variance(values: &Grid, returns: &Grid, mask: &Mask) -> Option<f64> {
    use crate::agentic_ppo::statistics::masked_variance;
    let unbiased = false;
    let variance = masked_variance(&returns.masked(mask), mask, unbiased);
    let unexplained = masked_variance(&returns.zip(values, |r, v| r - v).masked(mask), mask, unbiased);
    (variance > 0.0).then(|| 1.0 - unexplained / variance)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn grid(values: [f64; 6]) -> Grid {
        Grid::new(3, values.to_vec()).unwrap()
    }

    fn mask() -> Mask {
        Mask::new(3, vec![true, true, false, false, true, true]).unwrap()
    }

    #[test]
    fn clipped_value_loss_gradient_matches_finite_differences() {
        let (old, returns) = (grid([0.0, 1.0, 9.0, 9.0, -1.0, 0.5]), grid([1.0, 0.2, 7.0, 7.0, 0.4, 2.0]));
        let values = [0.6, 1.1, f64::NAN, 5.0, -1.9, 0.55];
        let totals = Totals::of_responses(&mask());
        for clip in [None, Some(0.3), Some(10.0)] {
            let at = |values: [f64; 6]| value_loss(&grid(values), &old, &returns, &mask(), clip, totals);
            let found = at(values);
            assert!(found.value.is_finite());
            for i in [0, 1, 3, 4, 5] {
                let moved = |by: f64| {
                    let mut values = values;
                    values[i] += by;
                    at(values).value
                };
                let quotient = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                assert!((quotient - found.d_values.values()[i]).abs() < 1e-8, "{clip:?} at {i}");
            }
        }
    }

    #[test]
    fn the_clip_keeps_the_larger_error() {
        let (old, returns) = (grid([0.0; 6]), grid([1.0, -1.0, 0.0, 0.0, 1.0, 1.0]));
        // Toward the return and past the range; away from it and past the range.
        let values = grid([0.9, 0.9, 0.0, 0.0, 0.1, 0.1]);
        let totals = Totals::of_responses(&mask());
        let found = value_loss(&values, &old, &returns, &mask(), Some(0.2), totals);
        assert_eq!(found.clip_fraction, 0.25);
        assert_eq!(found.d_values.values()[0], 0.0);
        assert!((found.d_values.values()[1] - 1.9 / 4.0).abs() < 1e-12);
        let expected = 0.5 * (0.8f64.powi(2) + 1.9f64.powi(2) + 2.0 * 0.9f64.powi(2)) / 4.0;
        assert!((found.value - expected).abs() < 1e-12);
    }

    #[test]
    fn explained_variance_of_perfect_values_is_one() {
        let returns = grid([1.0, 2.0, 50.0, 50.0, 3.0, 4.0]);
        assert_eq!(explained_variance(&returns, &returns, &mask()), Some(1.0));
        assert_eq!(explained_variance(&grid([7.0; 6]), &returns, &mask()), Some(0.0));
        assert_eq!(explained_variance(&returns, &grid([1.0; 6]), &mask()), None);
    }
}
