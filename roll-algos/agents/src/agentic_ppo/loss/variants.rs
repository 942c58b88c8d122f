//! The forms of the policy gradient ([`PgVariant`]): the loss of each token, and metrics.

use super::LossInputs;
use super::config::{LossConfig, PgVariant};
use crate::agentic_ppo::aggregate::{Aggregation, Totals};
use crate::agentic_ppo::grid::{Grid, Mask};
use crate::agentic_ppo::metrics::ActorMetrics;
use crate::agentic_ppo::statistics::{masked_mean, plain_mean, plain_std};

/// The inputs of one token's loss.
#[derive(Clone, Copy)]
struct Token {
    /// Row of its sample.
    row: usize,
    ratio: f64,
    advantage: f64,
    log_prob: f64,
    old_log_prob: f64,
}

/// The loss of one token, and its partial derivatives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct TokenLoss {
    value: f64,
    /// Derivative in the log-probability, with the ratio as a constant.
    d_log_prob: f64,
    /// Derivative in the ratio; 0 if the loss treats the ratio as a constant.
    d_ratio: f64,
}

/// The losses of all tokens, and their partial derivatives.
pub(super) struct TokenLosses {
    pub values: Grid,
    pub d_log_prob: Grid,
    pub d_ratio: Grid,
    pub metrics: ActorMetrics,
}

/// The inputs of the losses of all tokens.
pub(super) struct VariantInputs<'a> {
    pub config: &'a LossConfig,
    pub inputs: &'a LossInputs<'a>,
    pub old_log_probs: &'a Grid,
    /// Ratios of new to old probability, of tokens or segments.
    pub ratio: &'a Grid,
    /// Response tokens that passed the filters.
    pub mask: &'a Mask,
    pub totals: Totals,
}

/// The losses of all tokens in the form `pg_variant`, with its metrics.
pub(super) fn losses(view: &VariantInputs<'_>) -> TokenLosses {
    let config = view.config;
    let scores = view.inputs.episode_scores;
    let (low, high) = config.clip_range();
    let dual = config.dual_bound();
    let mut variant = match config.pg_variant {
        PgVariant::Vanilla => view.of_tokens(|token| weighted_log_prob(1.0, token)),
        PgVariant::Ppo => view.of_tokens(|token| clipped_surrogate(token.ratio, token.advantage, low, high, dual)),
        PgVariant::Tis => view.of_tokens(|token| {
            weighted_log_prob(token.ratio.clamp(config.tis_lower_bound, config.tis_upper_bound), token)
        }),
        PgVariant::Topr => view.of_tokens(|token| {
            if scores[token.row] > 0.0 {
                weighted_log_prob(config.topr_positive_weight, token)
            } else {
                weighted_log_prob(config.topr_negative_weight * token.ratio.clamp(0.0, 1.0), token)
            }
        }),
        PgVariant::Cispo => {
            let (low, high) = (1.0 - config.cispo_epsilon_low, 1.0 + config.cispo_epsilon_high);
            view.of_tokens(|token| {
                let Token { ratio, advantage, .. } = token;
                let is_clipped_by_ppo = (advantage > 0.0 && ratio > high) || (advantage < 0.0 && ratio < low);
                if config.cispo_use_unified_mask && is_clipped_by_ppo {
                    TokenLoss::default()
                } else {
                    weighted_log_prob(ratio.clamp(low, high), token)
                }
            })
        }
        PgVariant::Kimi15 => view.of_tokens(|token| {
            let log_ratio = token.log_prob - token.old_log_prob;
            TokenLoss {
                value: -token.advantage * token.log_prob + config.kimi15_tau * 0.5 * log_ratio * log_ratio,
                d_log_prob: -token.advantage + config.kimi15_tau * log_ratio,
                d_ratio: 0.0,
            }
        }),
    };
    variant.metrics = metrics(view, low, high);
    variant
}

/// `-weight A log p`, with the weight as a constant.
fn weighted_log_prob(weight: f64, token: Token) -> TokenLoss {
    let Token { advantage, log_prob, .. } = token;
    TokenLoss { value: -weight * advantage * log_prob, d_log_prob: -weight * advantage, d_ratio: 0.0 }
}

/// `-min(r A, clamp(r) A)`. With `dual`, the loss of an action with A < 0 is at most `-dual A`.
fn clipped_surrogate(ratio: f64, a: f64, low: f64, high: f64, dual: Option<f64>) -> TokenLoss {
    let (unclipped, clipped) = (ratio * a, ratio.clamp(low, high) * a);
    let (surrogate, slope) = if clipped < unclipped { (clipped, 0.0) } else { (unclipped, a) };
    match dual {
        Some(bound) if a < 0.0 && surrogate < bound * a => TokenLoss { value: -bound * a, ..TokenLoss::default() },
        _ => TokenLoss { value: -surrogate, d_ratio: -slope, d_log_prob: 0.0 },
    }
}

impl VariantInputs<'_> {
    /// Applies `loss` to every token. The metrics are empty.
    fn of_tokens(&self, loss: impl Fn(Token) -> TokenLoss) -> TokenLosses {
        let (rows, columns) = (self.ratio.rows(), self.ratio.columns());
        let zeros = || Grid::filled(rows, columns, 0.0);
        let (mut values, mut d_log_prob, mut d_ratio) = (zeros(), zeros(), zeros());
        for b in 0..rows {
            for t in 0..columns {
                let token_loss = loss(Token {
                    row: b,
                    ratio: self.ratio.row(b)[t],
                    advantage: self.inputs.advantages.row(b)[t],
                    log_prob: self.inputs.log_probs.row(b)[t],
                    old_log_prob: self.old_log_probs.row(b)[t],
                });
                values.row_mut(b)[t] = token_loss.value;
                d_log_prob.row_mut(b)[t] = token_loss.d_log_prob;
                d_ratio.row_mut(b)[t] = token_loss.d_ratio;
            }
        }
        TokenLosses { values, d_log_prob, d_ratio, metrics: ActorMetrics::default() }
    }

    /// 1 where the ratio meets `condition`, 0 elsewhere.
    fn where_ratio(&self, condition: impl Fn(f64) -> bool) -> Grid {
        self.ratio.map(|r| f64::from(u8::from(condition(r))))
    }

    /// The number of 1s of `grid` in this batch, divided by the number of response tokens of the update.
    fn fraction(&self, grid: &Grid) -> f64 {
        let mode = if self.config.reference_metrics { Aggregation::TokenMeanUnmasked } else { Aggregation::TokenMean };
        mode.of(grid, self.mask, self.totals)
    }

    /// Mean over the tokens of this batch that metrics count.
    fn mean(&self, grid: &Grid) -> f64 {
        if self.config.reference_metrics { plain_mean(grid.values()) } else { masked_mean(grid, self.mask) }
    }

    /// The values of the tokens that metrics count: the tokens of the mask, or all tokens with `reference_metrics`.
    fn counted(&self, grid: &Grid) -> Vec<f64> {
        let all = self.config.reference_metrics;
        grid.values().iter().zip(self.mask.kept()).filter(|(_, kept)| all || **kept).map(|(v, _)| *v).collect()
    }

    /// Mean over the tokens of each sample, then over the samples of the update.
    fn mean_of_samples(&self, grid: &Grid) -> f64 {
        Aggregation::SeqMeanTokenMean.of(grid, self.mask, self.totals)
    }
}

/// The metrics of the variant. `low` and `high` are the clip range of [`PgVariant::Ppo`].
fn metrics(view: &VariantInputs<'_>, low: f64, high: f64) -> ActorMetrics {
    let config = view.config;
    let mut metrics = ActorMetrics::default();
    match config.pg_variant {
        PgVariant::Vanilla => {}
        PgVariant::Ppo => {
            let (below, above) = (view.where_ratio(|r| r < low), view.where_ratio(|r| r > high));
            metrics.sum("ppo_ratio_low_clipfrac", view.fraction(&below));
            metrics.sum("ppo_ratio_high_clipfrac", view.fraction(&above));
            metrics.sum("ppo_ratio_clipfrac", view.fraction(&below.zip(&above, |b, a| b + a)));
            let clipped =
                view.ratio.zip(view.inputs.advantages, |r, a| f64::from(u8::from(r.clamp(low, high) * a < r * a)));
            metrics.sum("clipfrac", config.loss_agg_mode.of(&clipped, view.mask, view.totals));
        }
        PgVariant::Tis => {
            let (low, high) = (config.tis_lower_bound, config.tis_upper_bound);
            let (below, above) = (view.where_ratio(|r| r < low), view.where_ratio(|r| r > high));
            metrics.sum("tis_lower_clipfrac", view.fraction(&below));
            metrics.sum("tis_upper_clipfrac", view.fraction(&above));
            metrics.sum("tis_total_clipfrac", view.fraction(&below.zip(&above, |b, a| b + a)));
            metrics.sum("tis_clipped_ratio_mean", view.mean_of_samples(&view.ratio.map(|r| r.clamp(low, high))));
            metrics.mean("tis_lower_bound", low);
            metrics.mean("tis_upper_bound", high);
        }
        PgVariant::Topr => topr_metrics(view, &mut metrics),
        PgVariant::Cispo => {
            let (low, high) = (1.0 - config.cispo_epsilon_low, 1.0 + config.cispo_epsilon_high);
            let (below, above) = (view.where_ratio(|r| r < low), view.where_ratio(|r| r > high));
            metrics.mean("cispo_cispo_epsilon_low", config.cispo_epsilon_low);
            metrics.mean("cispo_cispo_epsilon_high", config.cispo_epsilon_high);
            metrics.mean("cispo_cispo_clip_lower", low);
            metrics.mean("cispo_cispo_clip_upper", high);
            metrics.mean("cispo_cispo_use_unified_mask", f64::from(u8::from(config.cispo_use_unified_mask)));
            metrics.mean("cispo_cispo_lower_clipfrac", view.mean(&below));
            metrics.mean("cispo_cispo_upper_clipfrac", view.mean(&above));
            metrics.mean("cispo_cispo_total_clipfrac", view.mean(&below.zip(&above, |b, a| b + a)));
            metrics.sum("cispo_clipped_ratio_mean", view.mean_of_samples(&view.ratio.map(|r| r.clamp(low, high))));
            if config.cispo_use_unified_mask {
                let advantages = view.inputs.advantages;
                let masked_positive = above.zip(advantages, |clipped, a| if a > 0.0 { clipped } else { 0.0 });
                let masked_negative = below.zip(advantages, |clipped, a| if a < 0.0 { clipped } else { 0.0 });
                metrics.mean("cispo_cispo_masked_positive_tokens", view.mean(&masked_positive));
                metrics.mean("cispo_cispo_masked_negative_tokens", view.mean(&masked_negative));
                let kept = masked_positive.zip(&masked_negative, |positive, negative| 1.0 - positive - negative);
                metrics.mean("cispo_cispo_kept_tokens", view.mean(&kept));
            }
        }
        PgVariant::Kimi15 => {
            // The reference takes the logarithm of ratio + 1e-8, which is the log-ratio to eight digits.
            let log_ratio = view.ratio.map(|r| (r + 1e-8).ln());
            let magnitude = view.mean(&log_ratio.zip(view.inputs.advantages, |d, a| (a * d).abs()));
            let regularizer = view.mean(&log_ratio.map(|d| config.kimi15_tau * d * d * 0.5));
            metrics.mean("kimi15_kimi15_tau", config.kimi15_tau);
            metrics.mean("kimi15_kimi15_log_ratio_mean", view.mean(&log_ratio));
            metrics.mean("kimi15_kimi15_log_ratio_std", plain_std(&view.counted(&log_ratio)));
            metrics.mean("kimi15_kimi15_log_ratio_abs_mean", view.mean(&log_ratio.map(f64::abs)));
            metrics.mean("kimi15_kimi15_policy_grad_magnitude", magnitude);
            metrics.mean("kimi15_kimi15_kl_reg_magnitude", regularizer);
            metrics.mean("kimi15_kimi15_reg_ratio", regularizer / (magnitude + 1e-8));
        }
    }
    metrics
}

/// Adds the metrics of [`PgVariant::Topr`], whose episodes are good (with a positive score) or bad.
fn topr_metrics(view: &VariantInputs<'_>, metrics: &mut ActorMetrics) {
    let (config, scores) = (view.config, view.inputs.episode_scores);
    let good = |b: usize| scores[b] > 0.0;
    let (good_mask, bad_mask) = (view.mask.rows_where(good), view.mask.rows_where(|b| !good(b)));
    let samples = scores.len().max(1) as f64;
    let good_count = (0..scores.len()).filter(|b| good(*b)).count() as f64;
    let good_losses = view.inputs.advantages.zip(view.inputs.log_probs, |a, log_p| -a * log_p);
    let bad_losses = view.ratio.zip(&good_losses, |ratio, loss| ratio.clamp(0.0, 1.0) * loss);
    // The loss of the rows that `is_chosen` accepts. `mask` has the tokens of the same rows.
    let aggregate = |losses: &Grid, is_chosen: &dyn Fn(usize) -> bool, mask: &Mask| {
        let mut chosen = Grid::filled(losses.rows(), losses.columns(), 0.0);
        for b in (0..losses.rows()).filter(|b| is_chosen(*b)) {
            chosen.row_mut(b).copy_from_slice(losses.row(b));
        }
        config.loss_agg_mode.of(&chosen, mask, Totals::of_rows(mask))
    };
    let positive = aggregate(&good_losses, &good, &good_mask);
    let negative = aggregate(&bad_losses, &|b| !good(b), &bad_mask);
    // Only ratios of bad episodes are truncated.
    let mut truncated = view.where_ratio(|r| r > 1.0);
    for b in (0..truncated.rows()).filter(|b| good(*b)) {
        truncated.row_mut(b).fill(0.0);
    }
    let truncated = view.mean(&truncated);
    metrics.sum("topr_positive_samples", good_count);
    metrics.sum("topr_negative_samples", scores.len() as f64 - good_count);
    metrics.mean("topr_positive_ratio", good_count / samples);
    metrics.mean("topr_negative_ratio", (scores.len() as f64 - good_count) / samples);
    metrics.mean("topr_negative_lower_clipfrac", 0.0);
    metrics.mean("topr_negative_upper_clipfrac", truncated);
    metrics.mean("topr_negative_total_clipfrac", truncated);
    metrics.mean("topr_scores_mean", plain_mean(scores));
    metrics.mean("topr_scores_std", plain_std(scores));
    metrics.mean("topr_positive_weight", config.topr_positive_weight);
    metrics.mean("topr_negative_weight", config.topr_negative_weight);
    metrics.mean("topr_positive_loss", positive);
    metrics.mean("topr_negative_loss", negative);
    metrics.mean("topr_weighted_positive_loss", config.topr_positive_weight * positive);
    metrics.mean("topr_weighted_negative_loss", config.topr_negative_weight * negative);
}
