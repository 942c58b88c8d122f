//! The trait of strategies, which turn gradients into updates of the parameters, in one process or over many ranks.

use std::sync::Arc;

use crate::{Communicator, Model, Result, SingleRank, StateDict, WeightPlacement};

/// Settings of AdamW and of gradient clipping.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct OptimizerConfig {
    /// Decay rates of the moments.
    #[serde(with = "crate::number")]
    pub betas: [f64; 2],
    /// Added to the square root of the second moment.
    #[serde(with = "crate::number")]
    pub eps: f64,
    /// Decoupled weight decay.
    #[serde(with = "crate::number")]
    pub weight_decay: f64,
    /// Maximum global norm of the gradient. A gradient of a larger norm is scaled down to it. 0 turns clipping off.
    #[serde(with = "crate::number")]
    pub max_grad_norm: f64,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 }
    }
}

/// The outcome of an update.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct StrategyReport {
    /// Global norm of the (scaled) gradient before clipping.
    #[serde(with = "crate::number")]
    pub grad_norm: f64,
    /// Whether clipping scaled the gradient down.
    #[serde(default)]
    pub clipped: bool,
    /// False when a non-finite gradient left the parameters as they were.
    pub applied: bool,
}

/// The ranks that a strategy trains on, and their groups.
#[derive(Clone, Debug)]
pub struct StrategyRanks {
    /// All ranks of the job.
    pub all: Arc<dyn Communicator>,
    /// The data-parallel ranks, over which the samples of a step are divided and counted: this rank, and the rank of
    /// the same position in every other token group. The same as `all` unless several ranks work on one sample.
    pub data: Arc<dyn Communicator>,
    /// This rank's token group: the ranks over which a model shards the tokens of each pass. They make the same passes
    /// with the same samples and noise, and each has the part of the gradient that its tokens contribute. `None`: each
    /// rank computes all tokens.
    pub tokens: Option<Arc<dyn Communicator>>,
}

impl StrategyRanks {
    /// Ranks that each have samples of their own: there are no token groups.
    pub fn new(all: Arc<dyn Communicator>) -> Self {
        Self { data: all.clone(), all, tokens: None }
    }
}

impl Default for StrategyRanks {
    /// One rank alone.
    fn default() -> Self {
        Self::new(Arc::new(SingleRank))
    }
}

/// Owns optimizer state and the gradient accumulator.
pub trait Strategy: Send {
    /// Where the strategy wants the model to keep its frozen weights. The model gets the answer when it is made
    /// ([`crate::BuildContext::placement`]). `None`: the model decides.
    fn weight_placement(&self) -> Option<WeightPlacement> {
        None
    }

    /// Takes over the optimization of `model`; reads its parameters.
    fn attach(&mut self, model: &mut dyn Model, optimizer: &OptimizerConfig) -> Result<()>;

    /// Announces the last pull before [`Strategy::accumulate`]. Gradients that this pull delivers are final, so that a
    /// strategy may reduce them while the pull goes on ([`crate::ParameterParts::deliver_gradients`]). The call is an
    /// optional hint. An algorithm that reads the model's gradients before `accumulate` must leave it out.
    fn before_last_pull(&mut self, _model: &mut dyn Model) -> Result<()> {
        Ok(())
    }

    /// Adds the model's accumulated gradients to the strategy's, and clears them in the model.
    fn accumulate(&mut self, model: &mut dyn Model) -> Result<()>;

    /// Clears the accumulated gradient.
    fn discard(&mut self);

    /// Multiplies the accumulated gradient (summed over ranks) by `scale`, clips it, updates the parameters of
    /// `model` at `learning_rate`, and clears the accumulator. A non-finite gradient changes nothing but the
    /// accumulator and is reported.
    fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale: f64) -> Result<StrategyReport>;

    /// The ranks of the job. They are known before [`Strategy::attach`].
    fn ranks(&self) -> &StrategyRanks;

    /// Optimizer state, for a checkpoint.
    fn state(&self) -> Result<StateDict>;

    /// Restores [`Strategy::state`].
    fn load_state(&mut self, state: &StateDict) -> Result<()>;
}
