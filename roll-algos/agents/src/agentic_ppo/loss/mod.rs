//! The policy loss: its value, its gradient in log-probabilities and entropies, and its metrics.
//!
//! Shapes are `[B, T]`, where column t is the prediction of token t + 1, as in [`roll_core::TokenStats`]. Values of
//! tokens outside the response are ignored, even if they are infinite or NaN.

mod config;
mod variants;

use roll_core::{Error, Result};

use super::aggregate::{Aggregation, Totals};
use super::correction::correct;
use super::grid::{Grid, Mask};
use super::kl::KlEstimate;
use super::metrics::ActorMetrics;
use super::statistics::segment_means;
pub use config::{LossConfig, PgVariant, RatioType};
use variants::{VariantInputs, losses};

/// The inputs of the loss of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct LossInputs<'a> {
    /// Log-probabilities under the present model.
    pub log_probs: &'a Grid,
    /// Entropies of the predictions; needed if the loss has an entropy bonus.
    pub entropy: Option<&'a Grid>,
    /// Log-probabilities under the model before the step's updates. `None`: no update was made yet, so that they are
    /// equal to `log_probs`, but constant.
    pub old_log_probs: Option<&'a Grid>,
    /// Log-probabilities that generation reported; `None`: the same as `old_log_probs`.
    pub infer_log_probs: Option<&'a Grid>,
    /// Log-probabilities under the reference policy. `None`: the run has no reference policy, and reports no KL.
    pub ref_log_probs: Option<&'a Grid>,
    /// Advantages.
    pub advantages: &'a Grid,
    /// Tokens that the agent wrote.
    pub response_mask: &'a Mask,
    /// Score of each row's episode.
    pub episode_scores: &'a [f64],
}

/// The loss of a micro-batch.
#[derive(Clone, Debug)]
pub struct PolicyLoss {
    /// Value of the loss. The values of all micro-batches of an update add up to the value of the update.
    pub value: f64,
    /// Gradient in `log_probs`.
    pub d_log_probs: Grid,
    /// Gradient in `entropy`; `None` if the loss has no entropy bonus.
    pub d_entropy: Option<Grid>,
    /// Metrics, each with its reduction over micro-batches.
    pub metrics: ActorMetrics,
}

/// The loss of one micro-batch of an update with `totals`:
/// `agg(is_weight * pg) + kl_loss_coef * agg(k3(log p, log p_ref)) - entropy_loss_coef * agg(entropy)`.
pub fn policy_loss(config: &LossConfig, inputs: &LossInputs<'_>, totals: Totals) -> Result<PolicyLoss> {
    check(config, inputs)?;
    let response = inputs.response_mask;
    let in_response = |grid: &Grid| grid.masked(response);
    let log_probs = in_response(inputs.log_probs);
    let old = inputs.old_log_probs.map_or_else(|| log_probs.clone(), in_response);
    let advantages = in_response(inputs.advantages);

    let infer = inputs.infer_log_probs.map_or_else(|| old.clone(), in_response);
    let correction = correct(&config.train_infer_correction, response, &old, &infer, totals, config.reference_metrics);
    let mask = &correction.mask;

    let log_ratio = log_probs.zip(&old, |new, old| new - old);
    let ratio = match config.ratio_type {
        RatioType::Token => log_ratio,
        RatioType::Segment => segment_means(&log_ratio, mask),
    }
    .map(f64::exp);

    let inputs = LossInputs { log_probs: &log_probs, advantages: &advantages, ..*inputs };
    let view = VariantInputs { config, inputs: &inputs, old_log_probs: &old, ratio: &ratio, mask, totals };
    let variant = losses(&view);
    let mut metrics = variant.metrics;

    let weights = config.loss_agg_mode.weights(mask, totals);
    let weighted = match config.train_infer_correction.is_weight.enabled {
        true => weights.weigh(&correction.weights),
        false => weights.clone(),
    };
    let pg_loss = weighted.dot(&variant.values);
    // d ratio / d log p is the ratio. The log-ratio of a segment is the mean of its tokens' log-ratios, and the
    // gradient of a mean is spread evenly, which `segment_means` does.
    let d_log_ratio = weighted.weigh(&variant.d_ratio).weigh(&ratio);
    let d_log_ratio = match config.ratio_type {
        RatioType::Token => d_log_ratio,
        RatioType::Segment => segment_means(&d_log_ratio, mask),
    };
    let mut d_log_probs = weighted.weigh(&variant.d_log_prob).zip(&d_log_ratio, |a, b| a + b);
    let mut value = pg_loss;

    if let Some(reference) = inputs.ref_log_probs.map(in_response) {
        let kl_weights = weights.masked(mask);
        let kl_loss = kl_weights.dot(&KlEstimate::K3.of(&log_probs, &reference));
        metrics.sum("kl_loss", kl_loss);
        if config.use_kl_loss {
            value += config.kl_loss_coef * kl_loss;
            let slopes = KlEstimate::K3.slopes(&log_probs, &reference);
            let d_kl = kl_weights.weigh(&slopes);
            d_log_probs = d_log_probs.zip(&d_kl, |d, d_kl| d + config.kl_loss_coef * d_kl);
        }
    }

    let mut d_entropy = None;
    if config.needs_entropy()
        && let Some(entropy) = inputs.entropy.map(in_response)
    {
        let entropy_loss = weights.dot(&entropy);
        value -= config.entropy_loss_coef * entropy_loss;
        d_entropy = Some(weights.map(|w| -config.entropy_loss_coef * w).masked(response));
        metrics.sum("entropy", entropy_loss);
    }

    metrics.sum("pg_loss", pg_loss);
    metrics.sum("total_loss", value);
    divergence_metrics(&view, &mut metrics);
    metrics.extend(correction.metrics);
    Ok(PolicyLoss { value, d_log_probs: d_log_probs.masked(response), d_entropy, metrics })
}

/// Adds metrics of the distance between the present policy and the policy before the step's updates.
fn divergence_metrics(view: &VariantInputs<'_>, metrics: &mut ActorMetrics) {
    let VariantInputs { config, inputs, old_log_probs, ratio, mask, totals } = *view;
    let aggregate = |grid: &Grid| config.loss_agg_mode.of(&grid.masked(mask), mask, totals);
    metrics.sum("approxkl", aggregate(&KlEstimate::Mse.of(inputs.log_probs, old_log_probs)));
    metrics.sum("policykl", aggregate(&KlEstimate::Kl.of(inputs.log_probs, old_log_probs)));
    metrics.sum("ratio_mean", Aggregation::SeqMeanTokenMean.of(ratio, mask, totals));
    let kept = || ratio.values().iter().zip(mask.kept()).filter(|(_, kept)| **kept).map(|(r, _)| *r);
    // Without tokens there is no largest and no smallest ratio; the reference reports 0 and 1e10.
    if mask.count() > 0 {
        metrics.max("ratio_max", kept().fold(f64::NEG_INFINITY, f64::max));
        metrics.min("ratio_min", kept().fold(f64::INFINITY, f64::min));
    }
}

/// Fails on inputs of other shapes than the mask's, and on missing inputs that the loss needs.
fn check(config: &LossConfig, inputs: &LossInputs<'_>) -> Result<()> {
    let mask = inputs.response_mask;
    let grids = [
        ("log-probabilities", Some(inputs.log_probs)),
        ("entropies", inputs.entropy),
        ("old log-probabilities", inputs.old_log_probs),
        ("log-probabilities of inference", inputs.infer_log_probs),
        ("reference log-probabilities", inputs.ref_log_probs),
        ("advantages", Some(inputs.advantages)),
    ];
    for (what, grid) in grids {
        grid.map_or(Ok(()), |grid| grid.expect_shape_of(mask, what))?;
    }
    if inputs.episode_scores.len() != mask.rows() {
        return Err(Error::shape("episode scores", format!("[{}]", mask.rows()), &[inputs.episode_scores.len()]));
    }
    if config.use_kl_loss && config.kl_loss_coef != 0.0 && inputs.ref_log_probs.is_none() {
        return Err(Error::Misuse("the KL loss needs log-probabilities of a reference policy".into()));
    }
    if config.needs_entropy() && inputs.entropy.is_none() {
        return Err(Error::Misuse("the entropy bonus needs entropies".into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
