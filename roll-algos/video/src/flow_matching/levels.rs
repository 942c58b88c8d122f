//! The distribution of noise levels.

use roll_core::{Sigma, SigmaRange};

/// Points of the table that inverts the distribution of logits, whose quantiles have no formula.
const POINTS: usize = 1025;
/// Standard deviations beyond which a normal density counts as 0.
const REACH: f64 = 8.0;

/// The distribution of noise levels, before it is restricted to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TimestepSampling {
    /// Every noise level with the same probability.
    Uniform,
    /// The logistic function of a normal draw, as for Stable Diffusion 3. Levels in the middle are more frequent.
    LogitNormal,
    /// The distribution of the sampler's steps: `sigma = s u / (1 + (s - 1) u)`, with a uniform u and the shift s.
    Shifted,
}

/// The normal distribution that logits are drawn from, for [`TimestepSampling::LogitNormal`].
#[derive(Clone, Copy, Debug)]
pub(super) struct LogitDistribution {
    pub(super) mean: f64,
    pub(super) deviation: f64,
}

/// The distribution of noise levels within a range. [`Levels::at`] turns a uniform draw into a level.
#[derive(Clone, Debug)]
pub struct Levels {
    range: SigmaRange,
    quantile: Quantile,
}

/// The inverse of a cumulative distribution of noise levels.
#[derive(Clone, Debug)]
enum Quantile {
    /// Uniform between the two ends (low, high) on the unshifted scale, then shifted.
    Shifted { shift: f64, ends: [f64; 2] },
    /// A table of equidistant logits: the first logit, their distance, and the cumulative probability at each.
    Logits { first: f64, distance: f64, cumulative: Vec<f64> },
}

impl Levels {
    pub(super) fn new(sampling: TimestepSampling, shift: f64, logit: LogitDistribution, range: SigmaRange) -> Self {
        let shifted =
            |shift: f64| Quantile::Shifted { shift, ends: [range.low, range.high].map(|end| unshift(end.0, shift)) };
        let quantile = match sampling {
            // A shift of 1 changes no level.
            TimestepSampling::Uniform => shifted(1.0),
            TimestepSampling::Shifted => shifted(shift),
            TimestepSampling::LogitNormal => logits(range, logit),
        };
        Self { range, quantile }
    }

    /// The range of the levels.
    pub fn range(&self) -> SigmaRange {
        self.range
    }

    /// The `u`-quantile, with `u` in [0, 1): the level below which a random level lies with probability `u`.
    pub fn at(&self, u: f64) -> Sigma {
        let sigma = match &self.quantile {
            Quantile::Shifted { shift, ends: [low, high] } => {
                let t = low + (high - low) * u;
                shift * t / (1.0 + (shift - 1.0) * t)
            }
            Quantile::Logits { first, distance, cumulative } => {
                // Linear interpolation between the points `above - 1` and `above` of the table.
                let above = cumulative.partition_point(|c| *c <= u).clamp(1, cumulative.len() - 1);
                let [before, after] = [cumulative[above - 1], cumulative[above]];
                let fraction = if after > before { (u - before) / (after - before) } else { 0.0 };
                logistic(first + distance * ((above - 1) as f64 + fraction))
            }
        };
        // The upper end belongs to the other expert, unless it is pure noise. Rounding must not reach it.
        let SigmaRange { low, high } = self.range;
        let end = if high.0 < 1.0 { high.0.next_down() } else { high.0 };
        Sigma(sigma.clamp(low.0, end))
    }
}

/// The inverse of the shift: the u of `sigma = s u / (1 + (s - 1) u)`.
fn unshift(sigma: f64, shift: f64) -> f64 {
    sigma / (shift - (shift - 1.0) * sigma)
}

fn logistic(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

/// The table of a normal density between the logits of the range's ends, integrated by the trapezoidal rule.
fn logits(range: SigmaRange, LogitDistribution { mean, deviation }: LogitDistribution) -> Quantile {
    let logit = |s: Sigma| (s.0 / (1.0 - s.0)).ln();
    // A range beyond `REACH` on one side shrinks to one logit, so that `Levels::at` returns the range's nearer end.
    let within_reach = |z: f64| z.clamp(mean - REACH * deviation, mean + REACH * deviation);
    let (first, last) = (within_reach(logit(range.low)), within_reach(logit(range.high)));
    let distance = (last - first) / (POINTS - 1) as f64;
    let exponents: Vec<f64> =
        (0..POINTS).map(|i| -0.5 * ((first + distance * i as f64 - mean) / deviation).powi(2)).collect();
    // Only ratios of densities matter. The greatest density becomes 1, so that the densities do not all underflow.
    let greatest = exponents.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let densities: Vec<f64> = exponents.iter().map(|e| (e - greatest).exp()).collect();
    let mut cumulative = vec![0.0];
    let mut sum = 0.0;
    for pair in densities.windows(2) {
        sum += 0.5 * (pair[0] + pair[1]);
        cumulative.push(sum);
    }
    cumulative.iter_mut().for_each(|c| *c /= sum);
    Quantile::Logits { first, distance, cumulative }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOW_NOISE: SigmaRange = SigmaRange { low: Sigma(0.0), high: Sigma(0.9) };
    const HIGH_NOISE: SigmaRange = SigmaRange { low: Sigma(0.9), high: Sigma(1.0) };

    fn levels(sampling: TimestepSampling, range: SigmaRange) -> Levels {
        Levels::new(sampling, 5.0, LogitDistribution { mean: 0.0, deviation: 1.0 }, range)
    }

    /// The share of draws below `sigma`.
    fn below(levels: &Levels, sigma: f64) -> f64 {
        (0..10_000).filter(|i| levels.at((f64::from(*i) + 0.5) / 1e4).0 < sigma).count() as f64 / 1e4
    }

    #[test]
    fn every_distribution_ascends_and_stays_in_its_range() {
        for sampling in [TimestepSampling::Uniform, TimestepSampling::LogitNormal, TimestepSampling::Shifted] {
            for range in [SigmaRange::ALL, LOW_NOISE, HIGH_NOISE] {
                let levels = levels(sampling, range);
                let drawn: Vec<Sigma> = (0..1000).map(|i| levels.at(f64::from(i) / 1000.0)).collect();
                assert!(drawn.windows(2).all(|w| w[0] <= w[1]), "{sampling:?}");
                assert!(drawn.iter().all(|s| range.contains(*s)), "{sampling:?}");
                assert!(range.contains(levels.at(1.0f64.next_down())));
            }
        }
    }

    #[test]
    fn the_quantiles_are_those_of_the_formulas() {
        let uniform = levels(TimestepSampling::Uniform, LOW_NOISE);
        assert!((below(&uniform, 0.45) - 0.5).abs() < 1e-3);
        // Shift 5 puts the level 0.9 at 0.6429 of the unshifted scale, and 5/6 at its middle.
        assert!((below(&levels(TimestepSampling::Shifted, SigmaRange::ALL), 0.9) - 0.6429).abs() < 1e-3);
        assert!((below(&levels(TimestepSampling::Shifted, LOW_NOISE), 5.0 / 6.0) - 0.5 / 0.6429).abs() < 1e-3);
        // The logistic function of 1 is 0.7311; a normal draw is below 1 with probability 0.8413.
        let normal = levels(TimestepSampling::LogitNormal, SigmaRange::ALL);
        assert!((below(&normal, 0.731_06) - 0.8413).abs() < 1e-3);
        let tail = levels(TimestepSampling::LogitNormal, HIGH_NOISE);
        assert!((below(&tail, 0.952_57) - (1.0 - 0.001_349 / 0.014_00)).abs() < 5e-3);
    }
}
