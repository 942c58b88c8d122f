//! Statistics over the tokens that a mask keeps.
//!
//! Where the mask keeps nothing, means and variances are 0: a row without response is a fact of rollouts, not an error.

use super::grid::{Grid, Mask};

/// Added to variances before their root is taken as a divisor.
const VARIANCE_FLOOR: f64 = 1e-8;

/// Mean of the values of the mask's tokens.
pub fn masked_mean(values: &Grid, mask: &Mask) -> f64 {
    mean(values.values(), mask.kept())
}

/// Sum of the values of the mask's tokens, for each row.
pub fn row_sums(values: &Grid, mask: &Mask) -> Vec<f64> {
    (0..values.rows()).map(|b| kept(values.row(b), mask.row(b)).sum()).collect()
}

/// Mean of the values of the mask's tokens, for each row.
pub fn row_means(values: &Grid, mask: &Mask) -> Vec<f64> {
    (0..values.rows()).map(|b| mean(values.row(b), mask.row(b))).collect()
}

/// Variance over the mask: the mean squared deviation; if `unbiased`, that times n / (n - 1), and 0 for a single token.
pub fn masked_variance(values: &Grid, mask: &Mask, unbiased: bool) -> f64 {
    let centre = masked_mean(values, mask);
    let biased = masked_mean(&values.map(|v| (v - centre).powi(2)), mask);
    match (unbiased, mask.count()) {
        (false, _) => biased,
        (true, n) if n > 1 => biased * n as f64 / (n - 1) as f64,
        _ => 0.0,
    }
}

/// `(values - mean) / sqrt(variance + 1e-8)` of every token, with mean and variance over the tokens of the mask.
pub fn masked_whiten(values: &Grid, mask: &Mask) -> Grid {
    let centre = masked_mean(values, mask);
    let unbiased = true;
    let scale = (masked_variance(values, mask, unbiased) + VARIANCE_FLOOR).sqrt().recip();
    values.map(|v| (v - centre) * scale)
}

/// The mean of each segment, at all tokens of the segment; 0 at other tokens.
///
/// The map is its own transpose: applied to the gradient of the result, the same function returns the gradient of the
/// values.
pub fn segment_means(values: &Grid, mask: &Mask) -> Grid {
    let mut means = Grid::filled(values.rows(), values.columns(), 0.0);
    for b in 0..values.rows() {
        for segment in mask.segments(b) {
            let mean = plain_mean(&values.row(b)[segment.clone()]);
            means.row_mut(b)[segment].fill(mean);
        }
    }
    means
}

/// The mean; 0 if there are no values.
pub fn plain_mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The unbiased standard deviation; 0 if there are fewer than two values.
pub fn plain_std(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let centre = plain_mean(values);
    (values.iter().map(|v| (v - centre).powi(2)).sum::<f64>() / (values.len() - 1) as f64).sqrt()
}

/// Fraction of values outside [-bound, bound]; 0 if there are no values.
pub fn clip_fraction(values: &[f64], bound: f64) -> f64 {
    let clipped = values.iter().filter(|v| v.abs() > bound).count();
    clipped as f64 / values.len().max(1) as f64
}

/// The chance that at least one of `k` of `n` samples, drawn without replacement, is among the `right` ones: the unbiased
/// estimate of pass@k (<https://arxiv.org/abs/2107.03374>). `k` is at most `n`, and so is `right`.
pub fn pass_at(k: usize, n: usize, right: usize) -> f64 {
    let wrong = n.saturating_sub(right);
    if wrong < k {
        return 1.0;
    }
    // All k are wrong: the product of (wrong - i) / (n - i).
    1.0 - (0..k).map(|i| (wrong - i) as f64 / (n - i) as f64).product::<f64>()
}

fn kept<'a>(values: &'a [f64], mask: &'a [bool]) -> impl Iterator<Item = f64> + 'a {
    values.iter().zip(mask).filter_map(|(v, kept)| kept.then_some(*v))
}

fn mean(values: &[f64], mask: &[bool]) -> f64 {
    let count = mask.iter().filter(|k| **k).count();
    kept(values, mask).sum::<f64>() / count.max(1) as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn pass_at_k_is_the_share_of_the_subsets_with_a_right_sample() {
        for n in 1..=8usize {
            for right in 0..=n {
                for k in 1..=n {
                    // The samples below `right` are right.
                    let of_size_k = (0u32..1 << n).filter(|set| set.count_ones() as usize == k);
                    let (all, good) = of_size_k.fold((0.0, 0.0), |(all, good), set| {
                        (all + 1.0, good + f64::from(u8::from(set & ((1 << right) - 1) != 0)))
                    });
                    assert!((pass_at(k, n, right) - good / all).abs() < 1e-12, "{k} {n} {right}");
                }
            }
        }
    }

    #[test]
    fn nothing_kept_is_zero_and_one_token_is_finite() {
        let values = Grid::new(3, vec![1.0, f64::NAN, 3.0, 5.0, 6.0, 7.0]).unwrap();
        let none = Mask::new(3, vec![false; 6]).unwrap();
        assert_eq!((masked_mean(&values, &none), row_means(&values, &none)), (0.0, vec![0.0, 0.0]));
        let one = Mask::new(3, vec![false, false, true, false, false, false]).unwrap();
        assert_eq!((masked_mean(&values, &one), masked_variance(&values, &one, true)), (3.0, 0.0));
        assert!(masked_whiten(&values, &one).values()[2] == 0.0);
    }
}
