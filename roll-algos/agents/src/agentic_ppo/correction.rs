//! Correction of the mismatch between the model that generated and the model that is trained.
//!
//! Inference kernels round differently from training kernels, so the same weights yield other log-probabilities.
//! Importance weights correct the loss for the difference, and filters leave out tokens at which it is too large.
//! `pi_old` is the probability of a token by training kernels before the update, `pi_infer` that by inference kernels.

use roll_core::{Error, Result};

use super::aggregate::{Aggregation, Totals};
use super::grid::{Grid, Mask};
use super::metrics::ActorMetrics;
use super::statistics::{masked_mean, row_means, row_sums, segment_means};

/// The unit of text that has one ratio `pi_old / pi_infer`, and how the ratio comes from those of its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// Each token by itself.
    #[default]
    Token,
    /// A turn of the agent: geometric mean of the ratios of its tokens.
    Segment,
    /// A sample: geometric mean of the ratios of its tokens.
    Geometric,
    /// A sample: product of the ratios of its tokens.
    Sequence,
}

impl Granularity {
    fn name(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Segment => "segment",
            Self::Geometric => "geometric",
            Self::Sequence => "sequence",
        }
    }

    /// Averages (or sums, for [`Granularity::Sequence`]) the `values` of each unit's tokens. Every token of the unit
    /// gets the result. For log-ratios, the result is the logarithm of the unit's ratio.
    fn collect(self, values: &Grid, mask: &Mask) -> Grid {
        match self {
            Self::Token => values.clone(),
            Self::Segment => segment_means(values, mask),
            Self::Geometric => Grid::spread(values.columns(), &row_means(values, mask)),
            Self::Sequence => Grid::spread(values.columns(), &row_sums(values, mask)),
        }
    }
}

/// Importance weights `pi_old / pi_infer` on the policy loss.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct IsWeight {
    /// Whether the loss is weighted.
    pub enabled: bool,
    /// Unit of text that has one ratio.
    pub weight_type: Granularity,
    /// Largest weight; `null`: unbounded.
    pub upper_bound: Option<f64>,
    /// Accepted because ROLL's files have it. It has no effect, because both log-probabilities are constants of the
    /// loss.
    pub detach: bool,
}

impl Default for IsWeight {
    fn default() -> Self {
        Self { enabled: false, weight_type: Granularity::Token, upper_bound: Some(1.2), detach: true }
    }
}

/// A rule that leaves tokens out of the loss.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Filter {
    /// Whether the rule applies.
    pub enabled: bool,
    /// Unit of text that has one ratio and one difference.
    pub agg_type: Granularity,
    /// Whether the ratio `pi_old / pi_infer` is bounded.
    pub ratio_enabled: bool,
    /// Least ratio.
    pub ratio_low: f64,
    /// Largest ratio.
    pub ratio_high: f64,
    /// Whether the difference `pi_old - pi_infer` is bounded.
    pub diff_enabled: bool,
    /// Least difference.
    pub diff_low: f64,
    /// Largest difference.
    pub diff_high: f64,
}

impl Default for Filter {
    fn default() -> Self {
        Self {
            enabled: true,
            agg_type: Granularity::Token,
            ratio_enabled: true,
            ratio_low: 0.8,
            ratio_high: 1.2,
            diff_enabled: false,
            diff_low: -0.2,
            diff_high: 0.2,
        }
    }
}

/// Options of the correction.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CorrectionConfig {
    /// Importance weights.
    pub is_weight: IsWeight,
    /// Rules that leave tokens out. A token remains in the loss if it passes all of them.
    pub filters: Vec<Filter>,
}

impl CorrectionConfig {
    /// Whether the correction changes the loss.
    pub fn is_active(&self) -> bool {
        self.is_weight.enabled || self.filters.iter().any(|f| f.enabled)
    }

    /// Fails on bounds that let nothing pass.
    pub fn check(&self) -> Result<()> {
        const SECTION: &str = "algo.train_infer_correction";
        for (i, f) in self.filters.iter().enumerate() {
            for (key, low, high) in [("ratio", f.ratio_low, f.ratio_high), ("diff", f.diff_low, f.diff_high)] {
                if low.is_nan() || high.is_nan() || low > high {
                    let key = format!("{SECTION}.filters.{i}.{key}_low");
                    return Err(Error::config(key, format!("{low} is above the upper bound {high}: nothing passes")));
                }
            }
        }
        match self.is_weight.upper_bound {
            Some(bound) if bound.is_nan() || bound <= 0.0 => {
                let problem = format!("expected a positive number or null, found {bound}");
                Err(Error::config(format!("{SECTION}.is_weight.upper_bound"), problem))
            }
            _ => Ok(()),
        }
    }
}

/// The correction of one batch.
#[derive(Clone, Debug)]
pub struct Correction {
    /// Weight of each token in the policy loss.
    pub weights: Grid,
    /// The response tokens that all filters let pass.
    pub mask: Mask,
    /// Metrics of the weights and the filters.
    pub metrics: ActorMetrics,
}

/// Computes the correction for the response tokens `mask` of a batch, from the log-probabilities of the training model
/// before the update and of the inference model.
///
/// With `unmasked_metrics`, fractions in metrics are computed as in the reference: the count includes tokens outside
/// the mask, the divisor does not.
pub fn correct(
    config: &CorrectionConfig,
    mask: &Mask,
    old_log_probs: &Grid,
    infer_log_probs: &Grid,
    totals: Totals,
    unmasked_metrics: bool,
) -> Correction {
    let fraction_mode = if unmasked_metrics { Aggregation::TokenMeanUnmasked } else { Aggregation::TokenMean };
    let log_ratio = old_log_probs.zip(infer_log_probs, |old, infer| old - infer);
    let difference = old_log_probs.zip(infer_log_probs, |old, infer| old.exp() - infer.exp());
    let ratio = |granularity: Granularity| granularity.collect(&log_ratio, mask).map(f64::exp);
    let mut metrics = ActorMetrics::default();

    let mut weights = Grid::filled(mask.rows(), mask.columns(), 1.0);
    if config.is_weight.enabled {
        weights = ratio(config.is_weight.weight_type);
        if let Some(bound) = config.is_weight.upper_bound {
            let clipped = weights.map(|w| f64::from(u8::from(w > bound)));
            metrics.sum("is_weight_clipfrac", fraction_mode.of(&clipped, mask, totals));
            weights = weights.map(|w| w.clamp(0.0, bound));
        }
    }

    let mut passing = mask.clone();
    for filter in config.filters.iter().filter(|f| f.enabled) {
        let name = filter.agg_type.name();
        if filter.ratio_enabled {
            let values = ratio(filter.agg_type);
            let passes = |v: f64| filter.ratio_low <= v && v <= filter.ratio_high;
            let passed = values.map(|v| f64::from(u8::from(passes(v))));
            metrics.sum(format!("train_infer_{name}_ratio_mask_mean"), fraction_mode.of(&passed, mask, totals));
            metrics
                .sum(format!("train_infer_ratio_{name}_mean"), Aggregation::SeqMeanTokenMean.of(&values, mask, totals));
            passing = passing.and(&values, passes);
        }
        if filter.diff_enabled {
            let values = filter.agg_type.collect(&difference, mask);
            let passes = |v: f64| filter.diff_low <= v && v <= filter.diff_high;
            let passed = values.map(|v| f64::from(u8::from(passes(v))));
            // A mean over micro-batches, unlike the metric of the ratio above: as the reference has it.
            metrics.mean(format!("train_infer_{name}_diff_mask_mean"), fraction_mode.of(&passed, mask, totals));
            metrics
                .sum(format!("train_infer_diff_{name}_mean"), Aggregation::SeqMeanTokenMean.of(&values, mask, totals));
            passing = passing.and(&values, passes);
        }
    }
    if !config.filters.is_empty() {
        metrics.mean("train_infer_final_mask_mean", masked_mean(&passing.to_grid(), mask));
    }
    Correction { weights, mask: passing, metrics }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn batch() -> (Mask, Grid, Grid) {
        let mask = Mask::new(4, vec![false, true, true, true, false, false, false, false]).unwrap();
        let old = Grid::new(4, vec![0.0, -1.0, -2.0, -0.5, 0.0, 0.0, 0.0, 0.0]).unwrap();
        let infer = Grid::new(4, vec![0.0, -1.1, -2.5, -0.5, 0.0, 0.0, 0.0, 0.0]).unwrap();
        (mask, old, infer)
    }

    #[test]
    fn without_options_nothing_changes() {
        let (mask, old, infer) = batch();
        let c = correct(&CorrectionConfig::default(), &mask, &old, &infer, Totals::of_responses(&mask), false);
        assert!(c.weights.values().iter().all(|w| *w == 1.0) && c.mask == mask && c.metrics.is_empty());
    }

    #[test]
    fn a_filter_drops_the_tokens_that_disagree() {
        let (mask, old, infer) = batch();
        let config = CorrectionConfig { filters: vec![Filter::default()], ..Default::default() };
        let c = correct(&config, &mask, &old, &infer, Totals::of_responses(&mask), false);
        assert_eq!(c.mask.row(0), [false, true, false, true]);
        let mean = c.metrics.get("train_infer_token_ratio_mask_mean").unwrap();
        assert!((mean - 2.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn fractions_stay_below_one_unless_the_reference_is_followed() {
        let (mask, old, infer) = batch();
        let filters = vec![Filter { ratio_high: 2.0, ..Filter::default() }];
        let config = CorrectionConfig { filters, ..Default::default() };
        let fraction = |unmasked| {
            let c = correct(&config, &mask, &old, &infer, Totals::of_responses(&mask), unmasked);
            c.metrics.get("train_infer_token_ratio_mask_mean").unwrap()
        };
        assert_eq!((fraction(false), fraction(true)), (1.0, 8.0 / 3.0));
    }

    #[test]
    fn bounds_that_let_nothing_pass_are_refused() {
        let filters = vec![Filter { ratio_low: 1.3, ..Filter::default() }];
        let error = CorrectionConfig { filters, ..Default::default() }.check();
        assert!(error.unwrap_err().to_string().contains("filters.0.ratio_low"));
    }
}
