//! The critic of generalized advantage estimation: the worth of a state of the conversation.
//!
//! It is a linear head on hidden states, the last one and a running mean of those before it. The last state alone
//! explains nothing of the returns: it speaks of the next token. The mean speaks of the last words that the agent has
//! read and planned.
//!
//! The states are the policy's, taken as they are: no gradient flows into the policy. The head's gradient is a product
//! in f64, its state a few thousand numbers, and its passes over the tokens of a step read the states of one forward
//! pass of the policy. With [`CriticLora`] they are those of the same frozen weights with adapters of the critic's own
//! (`adapters.rs`), which learn to see the causes of returns; each pass over the tokens then runs the network forward
//! and back. Rejected: a whole network of its own, which would need its weights once more.
//!
//! Ranks share the passes, the values and the gradients; all of them hold the same critic.

mod adapters;
mod features;
mod head;
mod loss;

use std::collections::BTreeMap;

use roll_core::{Adapter, Error, Model, Result, StateDict, StepContext, Tensor};
use serde::{Deserialize, Serialize};

use super::NAME;
use super::aggregate::{Aggregation, Totals};
use super::batch::Sample;
use super::config::AgenticPpoConfig;
use super::grid::{Grid, Mask};
use super::statistics::plain_mean;
use crate::ranks::{join_bits, share};
use crate::update::{OnNonfinite, language};
use adapters::Adapters;
pub use adapters::CriticLora;
use features::{Part, parts};
use head::{Features, ValueHead};
pub use loss::{ValueLoss, explained_variance, value_loss};

/// The critic. It has no head before it has seen a hidden state.
#[derive(Default, Serialize, Deserialize)]
pub struct Critic {
    head: Option<ValueHead>,
    /// Updates of the adapters; the tensors of a checkpoint have the rest of them.
    #[serde(default, skip_serializing_if = "is_zero")]
    updates: i32,
    #[serde(skip)]
    adapters: Option<Adapters>,
    #[serde(skip)]
    seed: u64,
}

fn is_zero(updates: &i32) -> bool {
    *updates == 0
}

/// The critic's values of the tokens of a step.
pub(super) struct Valued {
    /// The values of all samples, `[B, T]`; 0 where none was asked for.
    pub(super) values: Grid,
    /// Where they were asked for.
    wanted: Mask,
    /// Hidden states of this rank's samples, where no update changes them.
    features: Option<Features>,
}

impl Critic {
    /// A critic whose adapters are drawn by `seed`.
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Fails unless `model` has hidden states. Makes the adapters, if `options` ask for some and there are none.
    pub(super) fn open(&mut self, options: &CriticLora, model: &mut dyn Model) -> Result<()> {
        match (&self.adapters, options.is_on()) {
            (Some(_), _) => Ok(()),
            (None, true) => {
                self.adapters = Some(Adapters::open(options, model, self.seed)?);
                Ok(())
            }
            (None, false) => {
                let (token, mask) = (Tensor::new(vec![0i64], [1, 1])?, Tensor::new(vec![1u8], [1, 1])?);
                language(model, NAME)?.hidden_states(&token, &mask, Adapter::On).map(drop)
            }
        }
    }

    /// Whether one that was read from a checkpoint is whole.
    pub(super) fn is_whole(&self) -> bool {
        self.updates >= 0 && self.head.as_ref().is_none_or(ValueHead::is_whole)
    }

    /// Takes the state of a checkpoint, but for tensors.
    pub(super) fn restore(&mut self, saved: Self) {
        (self.head, self.updates) = (saved.head, saved.updates);
    }

    /// Adapters and their moments.
    pub(super) fn tensors(&self) -> Result<StateDict> {
        self.adapters.as_ref().map_or_else(|| Ok(StateDict::new()), Adapters::tensors)
    }

    /// Restores [`Critic::tensors`].
    pub(super) fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
        self.adapters.as_mut().map_or(Ok(()), |adapters| adapters.load(tensors))
    }

    /// The values of `samples` at the tokens `wanted`. Each rank reads a share.
    pub(super) fn values(
        &mut self,
        config: &AgenticPpoConfig,
        ctx: &mut StepContext<'_>,
        samples: &[Sample],
        wanted: &Mask,
    ) -> Result<Valued> {
        if config.critic_lora.is_on() {
            self.open(&config.critic_lora, ctx.model)?;
        }
        let mut features = Features::none();
        for part in parts(config, ctx.strategy.communicator(), samples)? {
            let [tokens, attention] = part.tokens();
            let states = match &mut self.adapters {
                Some(adapters) => adapters.states(tokens, attention)?,
                None => language(ctx.model, NAME)?.hidden_states(tokens, attention, Adapter::On)?,
            };
            part.read(&states, wanted, &mut features)?;
        }
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
        let cells = (0..wanted.rows()).flat_map(|b| wanted.columns_of(b).map(move |t| (b, t)));
        for ((b, t), value) in cells.zip(all) {
            values.row_mut(b)[t] = value;
        }
        let features = self.adapters.is_none().then_some(features);
        Ok(Valued { values, wanted: wanted.clone(), features })
    }

    /// Moves values toward the returns. Returns whether the critic changed: a gradient that is not finite leaves it as it
    /// was.
    pub(super) fn fit(
        &mut self,
        config: &AgenticPpoConfig,
        ctx: &StepContext<'_>,
        valued: &Valued,
        lesson: &Lesson<'_>,
        metrics: &mut BTreeMap<String, f64>,
    ) -> Result<bool> {
        let Some(head) = &mut self.head else { return Ok(false) };
        let ranks = ctx.strategy.communicator();
        let goal = Goal { config, valued, lesson, totals: Totals::of_responses(lesson.mask) };
        let own_parts = match self.adapters {
            Some(_) => parts(config, ranks, lesson.samples)?,
            None => Vec::new(),
        };
        let mut seen: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for _ in 0..config.critic_epochs {
            let (mut sums, mut d_adapters) = (vec![0.0; TOLD + head.dim() + 1], Vec::new());
            match (&valued.features, &mut self.adapters) {
                (Some(features), _) => {
                    let own_rows = share(ranks, lesson.mask.rows());
                    add(&mut sums, &goal.of(head, features, |b| own_rows.contains(&b)).parts);
                }
                (None, Some(adapters)) => {
                    adapters.forget()?;
                    for part in &own_parts {
                        add(&mut sums, &goal.pull(head, adapters, part)?);
                    }
                    d_adapters = adapters.gradient(ranks)?;
                }
                (None, None) => return Ok(false),
            }
            let sums = summed(&join_bits(ranks, sums.clone())?, sums.len());
            let (told, gradient) = sums.split_at(TOLD);
            let squares = gradient.iter().map(|g| g * g).sum::<f64>();
            let norm = d_adapters.iter().fold(squares, |sum, g| sum + f64::from(*g).powi(2)).sqrt();
            if !norm.is_finite() {
                let what = "the gradient of the critic".to_string();
                if config.on_nonfinite == OnNonfinite::Stop {
                    return Err(Error::NonFinite { what, value: norm });
                }
                tracing::warn!(step = ctx.step, norm, "{what} is not finite: its update is left out");
                return Ok(false);
            }
            head.update(gradient, config.critic_learning_rate);
            if let Some(adapters) = &mut self.adapters {
                self.updates = self.updates.saturating_add(1);
                adapters.update(&d_adapters, self.updates, config.critic_lora.learning_rate)?;
            }
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

/// The critic's lesson of a step.
pub(super) struct Lesson<'a> {
    pub(super) samples: &'a [Sample],
    pub(super) returns: &'a Grid,
    /// The tokens that count.
    pub(super) mask: &'a Mask,
}

/// Numbers that are told of a pass, before the gradient of the head.
const TOLD: usize = 4;

/// The goal of a step's values.
struct Goal<'a> {
    config: &'a AgenticPpoConfig,
    valued: &'a Valued,
    lesson: &'a Lesson<'a>,
    /// Of all samples of all ranks: the results of single parts add up.
    totals: Totals,
}

/// A loss and its gradients.
struct Judged {
    /// The numbers that are told, and the gradient of the head.
    parts: Vec<f64>,
    /// Gradient of the values, cell by cell.
    d_values: Vec<f64>,
}

impl Goal<'_> {
    /// The loss of `head`'s values of `features`, over the samples `own`.
    fn of(&self, head: &ValueHead, features: &Features, own: impl Fn(usize) -> bool) -> Judged {
        let Lesson { returns, mask, .. } = *self.lesson;
        let own = mask.rows_where(own);
        let mut values = Grid::filled(own.rows(), own.columns(), 0.0);
        for ((b, t), value) in features.cells.iter().zip(head.values(features)) {
            values.row_mut(*b)[*t] = value;
        }
        let loss = value_loss(&values, &self.valued.values, returns, &own, self.config.value_clip, self.totals);
        let d_values: Vec<f64> = features.cells.iter().map(|(b, t)| loss.d_values.row(*b)[*t]).collect();
        let mean = Aggregation::SeqMeanTokenMean.of(&values.masked(&own), &own, self.totals);
        let mut parts = vec![loss.value, loss.error, loss.clip_fraction, mean];
        parts.extend(head.gradient(features, &d_values));
        Judged { parts, d_values }
    }

    /// The same of one part of the samples, pulled back into the adapters.
    fn pull(&self, head: &ValueHead, adapters: &mut Adapters, part: &Part) -> Result<Vec<f64>> {
        let [tokens, attention] = part.tokens();
        let (states, pullback) = adapters.record(tokens, attention)?;
        let mut features = Features::none();
        part.read(&states, &self.valued.wanted, &mut features)?;
        let judged = self.of(head, &features, |b| part.has(b));
        if judged.d_values.iter().any(|d| *d != 0.0) {
            let d_states = part.pull(&head.pull(&judged.d_values), &self.valued.wanted, states.shape())?;
            pullback.pull(&d_states)?;
        }
        Ok(judged.parts)
    }
}

fn add(sums: &mut [f64], parts: &[f64]) {
    sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
}

/// Vectors of `len` values, one rank's after another, summed in the order of the ranks.
fn summed(all: &[f64], len: usize) -> Vec<f64> {
    let mut sums = vec![0.0; len];
    for rank in all.chunks(len.max(1)) {
        add(&mut sums, rank);
    }
    sums
}
