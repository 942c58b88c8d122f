//! The critic for generalized advantage estimation (GAE): it estimates the value of a state of the conversation.
//!
//! The critic is a linear head on two features of a token: its hidden state, and an exponentially decaying mean of the
//! hidden states up to and including it. The hidden state alone does not explain the returns, because it mostly encodes
//! the prediction of the next token. The mean encodes the words that the agent read and planned last.
//!
//! The hidden states are the policy's. No gradient flows into them. The head is cheap: a few thousand parameters in
//! f64, and all epochs of a step read features from one forward pass of the policy.
//!
//! The ranks divide the forward passes, the values and the gradients among themselves; every rank holds the same
//! critic.

mod features;
mod head;
mod loss;

use std::collections::BTreeMap;

use roll_core::{Adapter, Error, Model, Result, StepContext, Tensor};
use roll_step::ranks::{join_f64, share};
use roll_step::update::{OnNonfinite, language};
use serde::{Deserialize, Serialize};

use super::NAME;
use super::aggregate::{Aggregation, Totals};
use super::batch::TextSample;
use super::config::AgenticPpoConfig;
use super::grid::{Grid, Mask};
use super::statistics::plain_mean;
use features::Features;
use head::ValueHead;
pub use loss::{ValueLoss, explained_variance, value_loss};

/// The critic. It has no head before it has read a hidden state.
#[derive(Default, Serialize, Deserialize)]
pub struct Critic {
    head: Option<ValueHead>,
}

/// The critic's values of the tokens of a step, before the critic is fitted in the step.
pub(super) struct ValueEstimates {
    /// The values of all samples, `[B, T]`; 0 at tokens that are not wanted.
    pub(super) values: Grid,
    /// Features of this rank's samples.
    features: Features,
}

/// The data that the critic is fitted to in a step.
pub(super) struct FitBatch<'a> {
    pub(super) estimates: &'a ValueEstimates,
    pub(super) returns: &'a Grid,
    /// The response tokens that enter the loss.
    pub(super) mask: &'a Mask,
}

/// Names of the metrics of an epoch, in the order in which [`FitBatch::loss_and_gradient`] returns them.
const LOGGED: [&str; 4] = ["loss", "error", "clipfrac", "vpred"];

impl Critic {
    /// Fails if `model` has no hidden states. The check asks for the state of a padding token, which needs no forward
    /// pass.
    pub(super) fn check(model: &mut dyn Model) -> Result<()> {
        let (token, mask) = (Tensor::new(vec![0i64], [1, 1])?, Tensor::new(vec![0u8], [1, 1])?);
        language(model, NAME)?.hidden_states(&token, &mask, Adapter::On).map(drop)
    }

    /// Whether Adam's moments in a critic from a checkpoint have one number per parameter.
    pub(super) fn has_consistent_moments(&self) -> bool {
        self.head.as_ref().is_none_or(ValueHead::has_consistent_moments)
    }

    /// The values of `samples` at the tokens `wanted`. Each rank evaluates a share.
    pub(super) fn values(
        &mut self,
        config: &AgenticPpoConfig,
        ctx: &mut StepContext<'_>,
        samples: &[TextSample],
        wanted: &Mask,
    ) -> Result<ValueEstimates> {
        let features = Features::of(ctx, samples, wanted, config.micro_batch_size)?;
        let ranks = ctx.strategy.ranks().all.as_ref();
        // A rank without samples of its own learns the width from the other ranks.
        let widths = join_f64(ranks, vec![features.dim as f64])?;
        let dim = widths.into_iter().fold(0.0, f64::max) as usize;
        let head = self.head.get_or_insert_with(|| ValueHead::new(dim));
        if head.dim() != dim {
            let problem = format!(
                "the critic was trained on {} features of a token, and the model has {dim} (its hidden state, and a \
                 running mean of the states so far): continue with the model and the version of roll that the run \
                 began with",
                head.dim()
            );
            return Err(Error::Misuse(problem));
        }
        // Samples are in the order of episodes and turns, and ranks have consecutive ones: the joined values are in the
        // order of the wanted tokens.
        let all = join_f64(ranks, head.values(&features))?;
        let mut values = Grid::filled(wanted.rows(), wanted.columns(), 0.0);
        let cells = (0..wanted.rows()).flat_map(|b| wanted.columns_of(b).map(move |t| (b, t)));
        for ((b, t), value) in cells.zip(all) {
            values.row_mut(b)[t] = value;
        }
        Ok(ValueEstimates { values, features })
    }

    /// Fits the values to the returns, in `critic_epochs` updates. Returns whether all updates were made. Stops at the
    /// first gradient that is not finite, after which the updates of earlier epochs remain.
    pub(super) fn fit(
        &mut self,
        config: &AgenticPpoConfig,
        ctx: &StepContext<'_>,
        batch: &FitBatch<'_>,
        metrics: &mut BTreeMap<String, f64>,
    ) -> Result<bool> {
        let Some(head) = &mut self.head else { return Ok(false) };
        let ranks = ctx.strategy.ranks().all.as_ref();
        let mut logged: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for _ in 0..config.critic_epochs {
            let own_sums = batch.loss_and_gradient(head, share(ranks, batch.mask.rows()), config.value_clip);
            // Metrics, then the gradient of the weights and of the bias.
            let sums = summed(&join_f64(ranks, own_sums)?, LOGGED.len() + head.dim() + 1);
            let (losses, gradient) = sums.split_at(LOGGED.len());
            let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
            if !norm.is_finite() {
                let what = "the gradient of the critic".to_string();
                if config.on_nonfinite == OnNonfinite::Stop {
                    return Err(Error::NonFinite { what, value: norm });
                }
                tracing::warn!(step = ctx.step, norm, "{what} is not finite: its update is left out");
                return Ok(false);
            }
            head.update(gradient, config.critic_learning_rate);
            for (name, value) in LOGGED.iter().zip(losses).chain([(&"grad_norm", &norm)]) {
                logged.entry(name).or_default().push(*value);
            }
        }
        metrics.extend(logged.into_iter().map(|(name, values)| (format!("critic/{name}"), plain_mean(&values))));
        metrics.insert("critic/lr".into(), config.critic_learning_rate);
        Ok(true)
    }
}

impl FitBatch<'_> {
    /// The metrics [`LOGGED`] (loss, error, fraction of clipped values, mean value), then the gradient of `head`, over
    /// this rank's `own_samples`. They are divided by the token counts of all ranks, so that the results of the ranks
    /// add up.
    fn loss_and_gradient(&self, head: &ValueHead, own_samples: std::ops::Range<usize>, clip: Option<f64>) -> Vec<f64> {
        let (mask, totals) = (self.mask.rows_where(|b| own_samples.contains(&b)), Totals::of_responses(self.mask));
        let ValueEstimates { values: old_values, features } = self.estimates;
        let mut values = Grid::filled(mask.rows(), mask.columns(), 0.0);
        for ((b, t), value) in features.cells.iter().zip(head.values(features)) {
            values.row_mut(*b)[*t] = value;
        }
        let loss = value_loss(&values, old_values, self.returns, &mask, clip, totals);
        let d_values: Vec<f64> = features.cells.iter().map(|(b, t)| loss.d_values.row(*b)[*t]).collect();
        let mean_value = Aggregation::SeqMeanTokenMean.of(&values.masked(&mask), &mask, totals);
        let mut sums = vec![loss.value, loss.error, loss.clip_fraction, mean_value];
        sums.extend(head.gradient(features, &d_values));
        sums
    }
}

/// The sum over ranks. `all` has one vector of `len` values per rank, one after the other.
fn summed(all: &[f64], len: usize) -> Vec<f64> {
    let mut sums = vec![0.0; len];
    for values in all.chunks(len.max(1)) {
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
    sums
}
