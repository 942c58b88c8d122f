//! Differences between two measurements of the same clips: means with confidence intervals, a sign test, and the number
//! of decimals with which differences are written.

use serde::{Deserialize, Serialize};

/// A mean difference and its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gain {
    /// Mean of after - before.
    pub mean: f64,
    /// Lower and upper end of the interval; NaN (`null` in JSON) for fewer than two pairs.
    pub ci95: [f64; 2],
}

impl Gain {
    /// Whether the interval includes 0; false if there is no interval.
    pub fn includes_0(&self) -> bool {
        self.ci95[0] <= 0.0 && self.ci95[1] >= 0.0
    }

    /// The gain with its interval, if there is one: "+0.250 (95 % +0.200 to +0.300)". Small gains have more decimals.
    pub fn in_words(&self) -> String {
        let Self { mean, ci95: [low, high] } = self;
        let digits = decimals(*mean);
        match low.is_nan() {
            true => format!("{mean:+.digits$}"),
            false => format!("{mean:+.digits$} (95 % {low:+.digits$} to {high:+.digits$})"),
        }
    }
}

/// The number of decimals for a difference and for the two values that differ by it. It shows two significant digits of
/// the difference, and is at least three.
pub fn decimals(difference: f64) -> usize {
    const MIN: usize = 3;
    /// Differences that need more decimals are rounding errors of scores in f32.
    const MAX: usize = 9;
    let size = difference.abs();
    if size == 0.0 || !size.is_finite() {
        return MIN;
    }
    let for_two_digits = 1.0 - size.log10().floor();
    for_two_digits.clamp(MIN as f64, MAX as f64) as usize
}

/// Mean of `second - first` over pairs, with Student's interval for paired differences. A bootstrap over the pairs is
/// not used, because its interval is too narrow for few pairs.
pub fn paired_gain(pairs: &[[f64; 2]]) -> Gain {
    let differences: Vec<f64> = pairs.iter().map(|[first, second]| second - first).collect();
    let n = differences.len();
    let mean = differences.iter().sum::<f64>() / n as f64;
    let margin = match n {
        0 | 1 => f64::NAN,
        _ => student_975(n - 1) * standard_deviation(&differences) / (n as f64).sqrt(),
    };
    Gain { mean, ci95: [mean - margin, mean + margin] }
}

/// Standard deviation of a sample, with `n - 1` in its denominator; 0 for fewer than two values.
pub fn standard_deviation(values: &[f64]) -> f64 {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    if values.len() < 2 { 0.0 } else { (squares / (n - 1.0)).sqrt() }
}

/// The 97.5 % quantile of the normal distribution.
const NORMAL_975: f64 = 1.959_963_985;

/// The 97.5 % quantile of Student's distribution. For 1 and 2 degrees of freedom, these are the values of tables. For
/// more, they are the Cornish-Fisher expansion about the normal quantile (Abramowitz and Stegun 26.7.5), within 0.2 %.
fn student_975(degrees: usize) -> f64 {
    let z = NORMAL_975;
    // The coefficients of 1, 1/degrees, 1/degrees^2, and so on.
    let coefficients = [
        z,
        (z.powi(3) + z) / 4.0,
        (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0,
        (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0,
        (79.0 * z.powi(9) + 776.0 * z.powi(7) + 1482.0 * z.powi(5) - 1920.0 * z.powi(3) - 945.0 * z) / 92160.0,
    ];
    match degrees {
        0 => f64::NAN,
        1 => 12.706,
        2 => 4.303,
        _ => coefficients.iter().rev().fold(0.0, |sum, coefficient| sum / degrees as f64 + coefficient),
    }
}

/// Wilson's 95 % confidence interval of a probability, of which `fraction` of `n` independent trials are an estimate.
/// Unlike the normal interval it is never outside of 0 to 1, and has a width at 0 and at 1.
pub fn wilson_95(fraction: f64, n: usize) -> [f64; 2] {
    let (n, z2) = (n as f64, NORMAL_975 * NORMAL_975);
    let middle = fraction + z2 / (2.0 * n);
    let margin = NORMAL_975 * (fraction * (1.0 - fraction) / n + z2 / (4.0 * n * n)).sqrt();
    [middle - margin, middle + margin].map(|end| (end / (1.0 + z2 / n)).clamp(0.0, 1.0))
}

/// The two-sided sign test: the probability that a fair coin divides `won + lost` pairs at least as unevenly.
pub fn sign_test(won: u64, lost: u64) -> f64 {
    let pairs = won + lost;
    // The sum over k of the terms: the binomial coefficient (pairs, k) times 2^-pairs.
    let mut tail = 0.0;
    // The first term, for k = 0. The power is cut at 2^-1000, because numbers below 2^-1074 are 0.
    let mut term = 0.5f64.powi(pairs.min(1000) as i32);
    for k in 0..=won.min(lost) {
        tail += term;
        // The coefficient of k + 1, from the coefficient of k.
        term *= (pairs - k) as f64 / (k + 1) as f64;
    }
    (2.0 * tail).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sign_test_is_that_of_tables() {
        // 4048 / 2^17: the binomial coefficients of 18 up to the fourth.
        let table = [((0, 0), 1.0), ((6, 0), 0.03125), ((5, 0), 0.0625), ((4, 14), 4048.0 / 131_072.0), ((7, 7), 1.0)];
        for ((won, lost), expected) in table {
            assert!((sign_test(won, lost) - expected).abs() < 1e-12, "{won} to {lost}: {}", sign_test(won, lost));
        }
    }

    #[test]
    fn the_interval_contains_the_mean_and_shrinks_with_more_pairs() {
        let pairs = |n: usize| (0..n).map(|i| [0.0, 1.0 + (i as f64 * 2.4).sin()]).collect::<Vec<_>>();
        let (few, many) = (paired_gain(&pairs(8)), paired_gain(&pairs(128)));
        let width = |g: Gain| g.ci95[1] - g.ci95[0];
        assert!(few.ci95[0] < few.mean && few.mean < few.ci95[1]);
        // About as one over the root of the number of pairs.
        assert!(width(many) < 0.4 * width(few), "{many:?} {few:?}");
    }

    #[test]
    fn equal_differences_have_an_interval_of_width_0_and_one_pair_has_none() {
        assert_eq!(paired_gain(&[[0.0, 0.5], [1.0, 1.5]]), Gain { mean: 0.5, ci95: [0.5, 0.5] });
        let one = paired_gain(&[[0.0, 0.5]]);
        assert!(one.mean == 0.5 && one.ci95[0].is_nan() && one.in_words() == "+0.500", "{one:?}");
        assert!(paired_gain(&[]).mean.is_nan());
    }

    /// Wilson's formula by hand: 81 of 263 trials, and none of 10.
    #[test]
    fn the_interval_of_a_probability_is_that_of_tables() {
        for ((successes, n), expected) in
            [((81, 263), [0.2553, 0.3662]), ((0, 10), [0.0, 0.2775]), ((10, 10), [0.7225, 1.0])]
        {
            let found = wilson_95(f64::from(successes) / f64::from(n), n as usize);
            let is_close = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-4);
            assert!(is_close, "{successes} of {n}: {found:?}, expected {expected:?}");
        }
    }

    /// Values of a published table.
    #[test]
    fn quantiles_are_those_of_the_table() {
        for (degrees, expected) in [(1, 12.706), (3, 3.182), (4, 2.776), (7, 2.365), (23, 2.069), (120, 1.980)] {
            let found = student_975(degrees);
            assert!((found / expected - 1.0_f64).abs() < 2e-3, "{degrees}: {found}, expected {expected}");
        }
    }

    /// Four differences of one sign happen by chance one time in eight.
    #[test]
    fn four_uneven_differences_of_one_sign_are_no_proof() {
        let [low, _] = paired_gain(&[[0.0, 0.01], [0.0, 0.2], [0.0, 0.02], [0.0, 0.3]]).ci95;
        assert!(low < 0.0, "{low}");
    }

    #[test]
    fn small_differences_are_written_with_two_digits() {
        for (mean, text) in [(0.25, "+0.250"), (-0.0104, "-0.010"), (0.000_52, "+0.00052"), (-1.01e-5, "-0.000010")] {
            assert_eq!(Gain { mean, ci95: [f64::NAN; 2] }.in_words(), text);
        }
        assert_eq!((decimals(0.0), decimals(f64::NAN), decimals(40.0), decimals(1e-30)), (3, 3, 3, 9));
    }
}
