//! Statistics over the tokens that a mask keeps.
//!
//! Where the mask keeps nothing, means and variances are 0: a row without response is a fact of rollouts, not an error.

use super::grid::{Grid, Mask};

/// Added to variances before their root is divided by.
const VARIANCE_FLOOR: f64 = 1e-8;

/// Sum over the mask.
pub fn masked_sum(values: &Grid, mask: &Mask) -> f64 {
    kept(values.values(), mask.kept()).sum()
}

/// Mean over the mask.
pub fn masked_mean(values: &Grid, mask: &Mask) -> f64 {
    mean(values.values(), mask.kept())
}

/// Sum over the mask, by row.
pub fn row_sums(values: &Grid, mask: &Mask) -> Vec<f64> {
    (0..values.rows()).map(|b| kept(values.row(b), mask.row(b)).sum()).collect()
}

/// Mean over the mask, by row.
pub fn row_means(values: &Grid, mask: &Mask) -> Vec<f64> {
    (0..values.rows()).map(|b| mean(values.row(b), mask.row(b))).collect()
}

/// Variance over the mask; unbiased: n / (n - 1) times the mean square, 0 for a single token.
pub fn masked_variance(values: &Grid, mask: &Mask, unbiased: bool) -> f64 {
    let centre = masked_mean(values, mask);
    let biased = masked_mean(&values.map(|v| (v - centre).powi(2)), mask);
    match (unbiased, mask.count()) {
        (false, _) => biased,
        (true, n) if n > 1 => biased * n as f64 / (n - 1) as f64,
        _ => 0.0,
    }
}

/// `(values - mean) / sqrt(variance + 1e-8)`, with statistics over the mask; outside it the same map applies. Without
/// `shift_mean` the mean is added back.
pub fn masked_whiten(values: &Grid, mask: &Mask, shift_mean: bool) -> Grid {
    let centre = masked_mean(values, mask);
    let scale = (masked_variance(values, mask, true) + VARIANCE_FLOOR).sqrt().recip();
    let offset = if shift_mean { 0.0 } else { centre };
    values.map(|v| (v - centre) * scale + offset)
}

/// Each row centred and scaled by its own statistics over the mask; a value outside counts as 0 and is mapped alike.
/// The variance is floored at 1e-8.
pub fn normalize_rows(values: &Grid, mask: &Mask) -> Grid {
    let mut values = values.masked(mask);
    for b in 0..values.rows() {
        let centre = mean(values.row(b), mask.row(b));
        let variance = mean(&values.row(b).iter().map(|v| (v - centre).powi(2)).collect::<Vec<_>>(), mask.row(b));
        let scale = variance.max(VARIANCE_FLOOR).sqrt().recip();
        values.row_mut(b).iter_mut().for_each(|v| *v = (*v - centre) * scale);
    }
    values
}

/// Whitens by responses instead of tokens: centre and scale come from the means of the rows that have any token.
pub fn whiten_by_response(values: &Grid, mask: &Mask, shift_mean: bool) -> Grid {
    let means: Vec<f64> = row_means(values, mask)
        .into_iter()
        .zip(mask.row_counts())
        .filter_map(|(mean, count)| (count > 0).then_some(mean))
        .collect();
    let (centre, deviation) = (plain_mean(&means), plain_std(&means));
    let scale = (deviation * deviation + VARIANCE_FLOOR).sqrt().recip();
    let offset = if shift_mean { 0.0 } else { centre };
    values.map(|v| (v - centre) * scale + offset)
}

/// Each token of a segment holds the mean of its segment; 0 outside.
///
/// The map is its own transpose: the cotangent of the values is the same function of the cotangent of the result.
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

/// Mean; 0 of nothing.
pub fn plain_mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Unbiased standard deviation; 0 of fewer than two.
pub fn plain_std(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let centre = plain_mean(values);
    (values.iter().map(|v| (v - centre).powi(2)).sum::<f64>() / (values.len() - 1) as f64).sqrt()
}

/// Fraction of values outside [-bound, bound]; 0 of nothing.
pub fn clip_fraction(values: &[f64], bound: f64) -> f64 {
    let clipped = values.iter().filter(|v| v.abs() > bound).count();
    clipped as f64 / values.len().max(1) as f64
}

fn kept<'a>(values: &'a [f64], mask: &'a [bool]) -> impl Iterator<Item = f64> + 'a {
    values.iter().zip(mask).filter_map(|(v, kept)| kept.then_some(*v))
}

fn mean(values: &[f64], mask: &[bool]) -> f64 {
    let count = mask.iter().filter(|k| **k).count();
    kept(values, mask).sum::<f64>() / count.max(1) as f64
}

/// Mean and variance of a stream of batches (Chan's parallel update).
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunningMoments {
    /// Number of values seen.
    pub count: f64,
    /// Their mean.
    pub mean: f64,
    /// Their biased variance.
    pub variance: f64,
}

impl RunningMoments {
    /// Adds a batch.
    pub fn update(&mut self, batch: &[f64]) {
        if batch.is_empty() {
            return;
        }
        let n = batch.len() as f64;
        let mean = plain_mean(batch);
        let squares: f64 = batch.iter().map(|v| (v - mean).powi(2)).sum();
        let (delta, total) = (mean - self.mean, self.count + n);
        self.variance = (self.variance * self.count + squares + delta * delta * self.count * n / total) / total;
        self.mean += delta * n / total;
        self.count = total;
    }

    /// Unbiased standard deviation; 1 until two values were seen.
    pub fn std(&self) -> f64 {
        if self.count < 2.0 { 1.0 } else { (self.variance * self.count / (self.count - 1.0)).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn nothing_kept_is_zero_and_one_token_is_finite() {
        let values = Grid::new(3, vec![1.0, f64::NAN, 3.0, 5.0, 6.0, 7.0]).unwrap();
        let none = Mask::new(3, vec![false; 6]).unwrap();
        assert_eq!((masked_mean(&values, &none), row_means(&values, &none)), (0.0, vec![0.0, 0.0]));
        let one = Mask::new(3, vec![false, false, true, false, false, false]).unwrap();
        assert_eq!((masked_mean(&values, &one), masked_variance(&values, &one, true)), (3.0, 0.0));
        assert!(masked_whiten(&values, &one, true).values()[2] == 0.0);
        assert!(whiten_by_response(&values, &one, true).values()[2].abs() < 1e-9);
    }

    #[test]
    fn whitening_by_response_weighs_every_response_alike() {
        let values = Grid::new(2, vec![1.0, 1.0, 3.0, 9.0, 7.0, 7.0]).unwrap();
        let mask = Mask::new(2, vec![true, true, true, false, false, false]).unwrap();
        let whitened = whiten_by_response(&values, &mask, true);
        let (low, high) = (whitened.values()[0], whitened.values()[2]);
        assert!((low + high).abs() < 1e-9 && (high - 0.5f64.sqrt()).abs() < 1e-6);
    }

    #[test]
    fn running_moments_are_those_of_everything_seen() {
        let all = [1.0, 4.0, -2.0, 0.5, 3.0];
        let mut running = RunningMoments::default();
        running.update(&all[..2]);
        running.update(&all[2..]);
        assert!((running.mean - plain_mean(&all)).abs() < 1e-12);
        assert!((running.std() - plain_std(&all)).abs() < 1e-12);
    }
}
