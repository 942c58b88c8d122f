//! Confidence intervals of differences.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

/// A mean difference and its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// Mean of after - before.
    pub mean: f64,
    /// Lower and upper end.
    pub ci95: [f64; 2],
}

impl Gain {
    /// "+0.250 (95 % +0.200 to +0.300)".
    pub fn in_words(&self) -> String {
        let Self { mean, ci95: [low, high] } = self;
        format!("{mean:+.3} (95 % {low:+.3} to {high:+.3})")
    }
}

/// Draws of the bootstrap.
const RESAMPLES: usize = 10_000;

/// Mean of `second - first` over pairs, with a percentile-bootstrap interval over the pairs (Efron 1979). The draws are
/// seeded: the same pairs yield the same interval.
pub fn paired_gain(pairs: &[[f64; 2]]) -> Gain {
    let differences: Vec<f64> = pairs.iter().map(|[first, second]| second - first).collect();
    let n = differences.len();
    if n == 0 {
        return Gain { mean: f64::NAN, ci95: [f64::NAN; 2] };
    }
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut means: Vec<f64> =
        (0..RESAMPLES).map(|_| (0..n).map(|_| differences[rng.random_range(0..n)]).sum::<f64>() / n as f64).collect();
    means.sort_by(f64::total_cmp);
    let at = |share: f64| means[((RESAMPLES - 1) as f64 * share).round() as usize];
    Gain { mean: differences.iter().sum::<f64>() / n as f64, ci95: [at(0.025), at(0.975)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_contains_the_mean_and_shrinks_with_more_pairs() {
        let pairs = |n: usize| (0..n).map(|i| [0.0, 1.0 + (i as f64 * 2.4).sin()]).collect::<Vec<_>>();
        let (few, many) = (paired_gain(&pairs(8)), paired_gain(&pairs(128)));
        let width = |g: Gain| g.ci95[1] - g.ci95[0];
        assert!(few.ci95[0] < few.mean && few.mean < few.ci95[1]);
        // About as one over the root of the number of pairs.
        assert!(width(many) < 0.4 * width(few), "{many:?} {few:?}");
        assert_eq!(paired_gain(&pairs(8)), few);
    }

    #[test]
    fn equal_differences_have_an_interval_of_width_0() {
        assert_eq!(paired_gain(&[[0.0, 0.5], [1.0, 1.5]]), Gain { mean: 0.5, ci95: [0.5, 0.5] });
    }
}
