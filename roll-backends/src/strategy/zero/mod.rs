//! ZeRO: optimizer state (stage 1), gradients (stage 2) and frozen weights (stage 3) are sharded over the ranks.
//!
//! The trainable parameters are a flat vector. It is split into buckets of whole tensors, and each bucket into one
//! shard per rank. Gradients are reduced bucket by bucket to the rank that owns the shard. That rank holds the moments
//! of the shard and updates it; the shards of all ranks are all-gathered and written to the model. The frozen weights
//! of stage 3 are sharded by the weight store ([`crate::Sharded`]) and all-gathered block by block.
//!
//! A backward pass runs through the network in reverse, so buckets fill from the last to the first. Reductions are
//! started in that order, whether during the pass or after it (`reducer.rs`).
//!
//! Every stage computes the same bits: sums run over the ranks in their order whichever rank holds them, AdamW is
//! elementwise, and the gradient norm is summed shard by shard. Another number of ranks sums in another order, and the
//! result differs by rounding. It also differs by rounding if a single rank updates on the parameters' device, because
//! the gradients are then summed there.

#[cfg(test)]
mod device_tests;
mod drift;
mod gradients;
mod local_sums;
mod optimizer_state;
mod options;
mod parameter_access;
mod partition;
mod reducer;
mod sequence_parallel;
mod shard;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use roll_core::{
    Communicator, Model, OptimizerConfig, ParameterSpec, Result, SingleRank, StateDict, Strategy, StrategyRanks,
    StrategyReport, WeightPlacement, parse_options,
};

pub use options::{Offload, OffloadDevice, ZeroOptions};
pub use partition::{Bucket, Partition};

use super::saved::{self, SavedOptimizerState};
use super::{OptimizerLocation, check, check_step, not_attached};
use crate::optimizer::{AdamW, clip_coefficient};
use crate::overlap::OverlappedRanks;
use optimizer_state::{OptimizerState, Update};

const NAME: &str = "zero";

/// The strategy `zero`, and with a single rank also the strategy `single`.
pub struct Zero {
    options: ZeroOptions,
    ranks: Arc<OverlappedRanks>,
    /// The same ranks, with the groups of sequence parallelism.
    groups: StrategyRanks,
    attached: Option<Attached>,
}

/// The state after a model is attached.
struct Attached {
    optimizer: AdamW,
    max_grad_norm: f64,
    specs: Vec<ParameterSpec>,
    partition: Arc<Partition>,
    state: OptimizerState,
    /// Number of updates so far.
    updates: u64,
}

impl Zero {
    /// Creates a strategy without a model, on the ranks of `communicator`. Fails on invalid options.
    pub fn new(options: ZeroOptions, communicator: Arc<dyn Communicator>) -> Result<Self> {
        options.check()?;
        communicator.set_timeout(options.timeout());
        let ranks = OverlappedRanks::of(communicator);
        ranks.set_overlap(options.overlap_comm);
        let groups = sequence_parallel::strategy_ranks(&ranks, options.sequence_parallel_size, options.stage)?;
        Ok(Self { options, ranks, groups, attached: None })
    }

    /// The strategy of one process, without a model: nothing is sharded, and all parameters are one bucket.
    pub(super) fn alone(optimizer_on: OptimizerLocation) -> Self {
        let unlimited = usize::MAX;
        let options = ZeroOptions {
            stage: 0,
            optimizer_on,
            reduce_bucket_size: unlimited,
            allgather_bucket_size: unlimited,
            sub_group_size: unlimited,
            ..ZeroOptions::default()
        };
        let ranks = OverlappedRanks::of(Arc::new(SingleRank));
        Self { options, groups: StrategyRanks::new(ranks.clone()), ranks, attached: None }
    }

    fn attached(&mut self) -> Result<&mut Attached> {
        self.attached.as_mut().ok_or_else(not_attached)
    }
}

impl Strategy for Zero {
    fn weight_placement(&self) -> Option<WeightPlacement> {
        self.options.weight_placement()
    }

    /// Fails if the ranks train different parameters or start from different values.
    fn attach(&mut self, model: &mut dyn Model, optimizer: &OptimizerConfig) -> Result<()> {
        check(model, optimizer)?;
        let ranks = self.ranks.as_ref();
        let specs = model.parameters().to_vec();
        let partition = Arc::new(Partition::new(&specs, self.options.bucket_size(), ranks.world_size()));
        drift::check_same_parameters(&specs, ranks)?;
        drift::check_same_values(model, &specs, &partition, ranks, 0)?;
        let state = OptimizerState::zeros(&self.options, model, &partition, &self.ranks)?;
        let (optimizer, max_grad_norm) = (AdamW::new(optimizer), optimizer.max_grad_norm);
        self.attached = Some(Attached { optimizer, max_grad_norm, specs, partition, state, updates: 0 });
        Ok(())
    }

    fn before_last_pull(&mut self, model: &mut dyn Model) -> Result<()> {
        let delivers = self.ranks.world_size() == 1 || self.ranks.overlaps();
        let attached = self.attached()?;
        // The model needs parts, so that the gradients that are not delivered can be taken bucket by bucket.
        if delivers
            && let Some(receiver) = attached.state.receiver()
            && let Some(parts) = model.parts()
            && parts.deliver_gradients(Some(receiver.sink()))
        {
            receiver.open();
        }
        Ok(())
    }

    /// Ranks may call this at different times, and a different number of times.
    fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        self.attached()?.state.accumulate(model)
    }

    fn discard(&mut self) {
        if let Some(attached) = &mut self.attached {
            if let Some(receiver) = attached.state.receiver() {
                receiver.close();
            }
            attached.state.clear();
        }
    }

    fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale: f64) -> Result<StrategyReport> {
        check_step(learning_rate, scale)?;
        let (ranks, check_every) = (self.ranks.clone(), self.options.check_every);
        ranks.settle()?;
        let Attached { optimizer, max_grad_norm, specs, partition, state, updates } = self.attached()?;
        let grad_norm = state.norm(scale)?;
        if !grad_norm.is_finite() {
            state.clear();
            return Ok(StrategyReport { grad_norm, clipped: false, applied: false });
        }
        let clip = clip_coefficient(grad_norm, *max_grad_norm);
        *updates += 1;
        state.update(model, &Update { optimizer, step: *updates, learning_rate, scale, clip })?;
        state.clear();
        if check_every > 0 && updates.is_multiple_of(check_every) {
            drift::check_same_values(model, specs, partition, ranks.as_ref(), *updates)?;
        }
        Ok(StrategyReport { grad_norm, clipped: clip < 1.0, applied: true })
    }

    fn ranks(&self) -> &StrategyRanks {
        &self.groups
    }

    /// Must be called by all ranks. Rank 0 receives the complete state, whose layout depends neither on the number of
    /// ranks nor on the stage, so that a run can resume with another number or stage. Other ranks receive an empty
    /// state.
    fn state(&self) -> Result<StateDict> {
        let attached = self.attached.as_ref().ok_or_else(not_attached)?;
        let mut state = StateDict::new();
        attached.state.save(&attached.specs, &mut state)?;
        if self.ranks.rank().0 == 0 {
            saved::save_step(&mut state, attached.updates)?;
        }
        Ok(state)
    }

    /// Takes the complete state on every rank and keeps this rank's shards. Fails, without changing anything, if a
    /// tensor is missing, unexpected, misshapen, or holds values that are invalid for a moment.
    fn load_state(&mut self, state: &StateDict) -> Result<()> {
        let attached = self.attached()?;
        let saved = SavedOptimizerState::check(&attached.specs, state)?;
        attached.state.load(&saved, &attached.specs)?;
        attached.updates = saved.step;
        Ok(())
    }
}

roll_core::register! {
    Strategy, NAME, ZeroOptions,
    "Several ranks: optimizer state, gradients and frozen weights sharded over them (ZeRO 0 to 3)",
    |options, context| Zero::new(options, context.ranks.clone()),
    plan: |options| {
        let options: ZeroOptions = parse_options("strategy", options)?;
        options.check()?;
        Ok(options.division())
    },
}
