//! The critic of generalized advantage estimation: what a state of the conversation is worth.
//!
//! It is a linear head on the policy's hidden states, the last one and a running mean of those before it, taken as they
//! are: no gradient flows into the policy. The last state alone explains nothing of the returns: it speaks of the next
//! token. The mean speaks of what the agent has read and planned in its last words. Rejected: a
//! network of its own, or an adapter of its own on the policy's base. Either needs a second backward pass through the
//! network, optimizer state of its size, and a place for it in every checkpoint; the head's gradient is a product in f64,
//! its state a few thousand numbers, and its passes over the tokens of a step read hidden states that one forward pass of
//! the policy gave. Ranks share that pass, the values and the gradients; all of them hold the same head.

mod head;
mod loss;

use std::collections::BTreeMap;

use roll_core::{Adapter, Error, LanguageModel, Result, StepContext, Tensor};
use serde::{Deserialize, Serialize};

use super::NAME;
use super::aggregate::Totals;
use super::batch::{Batch, Evaluated, Sample, by_episodes};
use super::config::AgenticPpoConfig;
use super::grid::{Grid, Mask};
use super::statistics::plain_mean;
use crate::ranks::{join_bits, share};
use crate::update::{OnNonfinite, language};
use head::{Features, ValueHead};
pub use loss::{ValueLoss, explained_variance, value_loss};

/// The critic. It has no head before it has seen a hidden state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Critic {
    head: Option<ValueHead>,
}

/// What the critic says of the tokens of a step.
pub(super) struct Valued {
    /// The values of all samples, `[B, T]`; 0 where none was asked for.
    pub(super) values: Grid,
    /// Hidden states of this rank's samples.
    features: Features,
}

/// Fails unless `model` gives hidden states.
pub(super) fn check(model: &mut dyn LanguageModel) -> Result<()> {
    let (token, mask) = (Tensor::new(vec![0i64], [1, 1])?, Tensor::new(vec![1u8], [1, 1])?);
    model.hidden_states(&token, &mask, Adapter::On).map(drop)
}

impl Critic {
    /// Whether what was read from a checkpoint is one.
    pub(super) fn is_whole(&self) -> bool {
        self.head.as_ref().is_none_or(ValueHead::is_whole)
    }

    /// The values of `samples` at the tokens `wanted`. Each rank reads a share.
    pub(super) fn values(
        &mut self,
        config: &AgenticPpoConfig,
        ctx: &mut StepContext<'_>,
        samples: &[Sample],
        wanted: &Mask,
    ) -> Result<Valued> {
        let features = features(config, ctx, samples, wanted)?;
        // A rank without samples of its own learns the width from the others.
        let widths = join_bits(ctx.strategy.communicator(), vec![features.dim as f64])?;
        let dim = widths.into_iter().fold(0.0, f64::max) as usize;
        let head = self.head.get_or_insert_with(|| ValueHead::new(dim));
        if head.dim() != dim {
            let problem = format!(
                "the critic was trained on {} features of a token, and the model gives {dim} (its hidden state, and the \
                 mean of those before): continue with the model and the version of roll that the run began with",
                head.dim()
            );
            return Err(Error::Misuse(problem));
        }
        let own = head.values(&features);
        let all = join_bits(ctx.strategy.communicator(), own)?;
        let mut values = Grid::filled(wanted.rows(), wanted.columns(), 0.0);
        let cells = (0..wanted.rows()).flat_map(|b| columns(wanted, b).map(move |t| (b, t)));
        for ((b, t), value) in cells.zip(all) {
            values.row_mut(b)[t] = value;
        }
        Ok(Valued { values, features })
    }

    /// Moves the values of the tokens `mask` toward `returns`. Returns whether the head changed: a gradient that is not
    /// finite leaves it as it was.
    pub(super) fn fit(
        &mut self,
        config: &AgenticPpoConfig,
        ctx: &StepContext<'_>,
        valued: &Valued,
        returns: &Grid,
        mask: &Mask,
        metrics: &mut BTreeMap<String, f64>,
    ) -> Result<bool> {
        let Some(head) = &mut self.head else { return Ok(false) };
        let (features, ranks, totals) = (&valued.features, ctx.strategy.communicator(), Totals::of_responses(mask));
        let own_rows = share(ranks, mask.rows());
        let own = mask.rows_where(|b| own_rows.contains(&b));
        let mut seen: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for _ in 0..config.critic_epochs {
            let mut values = Grid::filled(mask.rows(), mask.columns(), 0.0);
            for ((b, t), value) in features.cells.iter().zip(head.values(features)) {
                values.row_mut(*b)[*t] = value;
            }
            let loss = value_loss(&values, &valued.values, returns, &own, config.value_clip, totals);
            let d_values: Vec<f64> = features.cells.iter().map(|(b, t)| loss.d_values.row(*b)[*t]).collect();
            let mean = super::Aggregation::SeqMeanTokenMean.of(&values.masked(&own), &own, totals);
            let mut parts = vec![loss.value, loss.error, loss.clip_fraction, mean];
            parts.extend(head.gradient(features, &d_values));
            let sums = summed(&join_bits(ranks, parts.clone())?, parts.len());
            let (told, gradient) = sums.split_at(4);
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
            for (name, value) in
                ["loss", "error", "clipfrac", "vpred", "grad_norm"].iter().zip(told.iter().chain([&norm]))
            {
                seen.entry(name).or_default().push(*value);
            }
        }
        metrics.extend(seen.into_iter().map(|(name, values)| (format!("critic/{name}"), plain_mean(&values))));
        metrics.insert("critic/lr".into(), config.critic_learning_rate);
        Ok(true)
    }
}

/// Vectors of `len` values, one rank's after another, summed in the order of the ranks.
fn summed(all: &[f64], len: usize) -> Vec<f64> {
    let mut sums = vec![0.0; len];
    for rank in all.chunks(len.max(1)) {
        sums.iter_mut().zip(rank).for_each(|(sum, value)| *sum += value);
    }
    sums
}

fn columns(mask: &Mask, b: usize) -> impl Iterator<Item = usize> + '_ {
    mask.row(b).iter().enumerate().filter_map(|(t, kept)| kept.then_some(t))
}

/// Hidden states of this rank's share of `samples`, at the tokens `wanted`.
fn features(
    config: &AgenticPpoConfig,
    ctx: &mut StepContext<'_>,
    samples: &[Sample],
    wanted: &Mask,
) -> Result<Features> {
    let mut features = Features { dim: 0, cells: Vec::new(), states: Vec::new() };
    let own: Vec<usize> = share(ctx.strategy.communicator(), samples.len()).collect();
    for rows in by_episodes(samples, &own, config.micro_batch_size) {
        let chosen: Vec<&Sample> = rows.iter().map(|i| &samples[*i]).collect();
        let width = chosen.iter().map(|s| s.tokens.len()).max().unwrap_or(0).max(2);
        let evaluated = Evaluated::new(&chosen, width)?;
        let Batch { tokens, attention, .. } = &evaluated.batch;
        let states = language(ctx.model, NAME)?.hidden_states(tokens, attention, Adapter::On)?;
        let [_, columns_found, dim] = *states.shape() else {
            return Err(Error::shape("hidden states", format!("[{}, {width}, D]", chosen.len()), states.shape()));
        };
        if columns_found != width || (features.dim != 0 && features.dim != 2 * dim) {
            return Err(Error::shape("hidden states", format!("[B, {width}, {}]", features.dim / 2), states.shape()));
        }
        features.dim = 2 * dim;
        let states = states.f32s()?;
        for (sample, row) in rows.iter().zip(evaluated.rows()) {
            let mut recent = RunningMean::new(dim);
            // The state after token t speaks of token t + 1, which column t has.
            for t in columns(wanted, *sample) {
                let state = &states[(row * width + t) * dim..][..dim];
                features.cells.push((*sample, t));
                features.states.extend_from_slice(state);
                features.states.extend(recent.with(state));
            }
        }
    }
    if let Some(value) = features.states.iter().find(|v| !v.is_finite()) {
        return Err(Error::NonFinite { what: format!("a hidden state that `{NAME}` reads"), value: f64::from(*value) });
    }
    Ok(features)
}

/// The mean of the states of a sample so far, with more weight on the later ones.
struct RunningMean {
    sum: Vec<f32>,
    weight: f32,
}

impl RunningMean {
    /// What a state still counts after the next one: the mean reaches back over the words of about one turn.
    const KEPT: f32 = 15.0 / 16.0;

    fn new(dim: usize) -> Self {
        Self { sum: vec![0.0; dim], weight: 0.0 }
    }

    /// The mean with one more state.
    fn with(&mut self, state: &[f32]) -> impl Iterator<Item = f32> + '_ {
        self.weight = Self::KEPT * self.weight + 1.0;
        self.sum.iter_mut().zip(state).for_each(|(sum, value)| *sum = Self::KEPT * *sum + value);
        self.sum.iter().map(|sum| sum / self.weight)
    }
}
