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
//! elementwise, and the gradient norm is summed shard by shard. Another number of ranks sums in another order and
//! differs by rounding.

#[cfg(test)]
mod device_tests;
mod drift;
mod gradients;
mod optimizer_state;
mod options;
mod parameter_access;
mod partition;
mod reducer;
mod sequence_parallel;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use roll_core::{
    Communicator, Model, OptimizerConfig, ParameterSpec, Result, StateDict, Strategy, StrategyRanks, StrategyReport,
    WeightPlacement, parse_options,
};

pub use options::{Offload, OffloadDevice, ZeroOptions};
pub use partition::{Bucket, Partition};

use super::saved::{self, SavedOptimizerState};
use super::{check, check_step, not_attached};
use crate::optimizer::{AdamW, clip_coefficient};
use crate::overlap::OverlappedRanks;
use gradients::Gradients;
use optimizer_state::{OptimizerState, UpdateContext};
use reducer::GradientReducer;

const NAME: &str = "zero";

/// The strategy `zero`.
pub struct Zero {
    options: ZeroOptions,
    ranks: Arc<OverlappedRanks>,
    groups: StrategyRanks,
    attached: Option<Attached>,
}

/// The state after a model is attached.
struct Attached {
    optimizer: AdamW,
    max_grad_norm: f64,
    specs: Vec<ParameterSpec>,
    partition: Arc<Partition>,
    gradients: Arc<Gradients>,
    reducer: Arc<GradientReducer>,
    optimizer_state: OptimizerState,
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

    fn attached(&mut self) -> Result<&mut Attached> {
        self.attached.as_mut().ok_or_else(|| not_attached(NAME))
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
        drift::same_parameters(&specs, ranks)?;
        drift::same_values(model, &specs, &partition, ranks, 0)?;
        let gradients = Arc::new(Gradients::new(partition.clone(), self.options.stage < 2));
        let optimizer_state = OptimizerState::zeros(&self.options, model, &partition, ranks)?;
        let service = self.ranks.register(gradients.clone());
        let reducer = Arc::new(GradientReducer::new(partition.clone(), &specs, self.ranks.clone(), service));
        self.attached = Some(Attached {
            optimizer: AdamW::new(optimizer),
            max_grad_norm: optimizer.max_grad_norm,
            specs,
            partition,
            gradients,
            reducer,
            optimizer_state,
        });
        Ok(())
    }

    fn before_last_pull(&mut self, model: &mut dyn Model) -> Result<()> {
        let overlaps = self.ranks.overlaps();
        let reducer = self.attached()?.reducer.clone();
        // The remaining gradients can only be taken bucket by bucket if the model has parts.
        if let Some(parts) = model.parts().filter(|_| overlaps)
            && parts.deliver_gradients(Some(reducer.clone()))
        {
            reducer.open();
        }
        Ok(())
    }

    /// Ranks may call this at different times, and a different number of times.
    fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        let reducer = self.attached()?.reducer.clone();
        if let Some(parts) = model.parts() {
            parts.deliver_gradients(None);
        }
        reducer.finish(model)
    }

    fn discard(&mut self) {
        if let Some(attached) = &self.attached {
            attached.reducer.close();
            attached.gradients.clear();
        }
    }

    fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale: f64) -> Result<StrategyReport> {
        check_step(learning_rate, scale)?;
        let (ranks, stage, check_every) = (self.ranks.clone(), self.options.stage, self.options.check_every);
        ranks.settle()?;
        let a = self.attached()?;
        a.gradients.scale(scale);
        let grad_norm = a.gradients.sum_of_squares(ranks.as_ref())?.sqrt();
        if !grad_norm.is_finite() {
            a.gradients.clear();
            return Ok(StrategyReport { grad_norm, clipped: false, applied: false });
        }
        let coefficient = clip_coefficient(grad_norm, a.max_grad_norm);
        let Attached { optimizer, specs, partition, gradients, optimizer_state, .. } = a;
        gradients.scale(coefficient);
        let context = UpdateContext {
            optimizer,
            partition,
            gradients,
            ranks: ranks.as_ref(),
            replicated: stage == 0,
            learning_rate,
        };
        optimizer_state.update(model, &context)?;
        gradients.clear();
        let updates = optimizer_state.step();
        if check_every > 0 && updates.is_multiple_of(check_every) {
            drift::same_values(model, specs, partition, ranks.as_ref(), updates)?;
        }
        Ok(StrategyReport { grad_norm, clipped: coefficient < 1.0, applied: true })
    }

    fn ranks(&self) -> &StrategyRanks {
        &self.groups
    }

    /// Must be called by all ranks. Rank 0 receives the complete state, in the layout of the strategy `single`, so that
    /// a run can resume on any number of ranks, stage and strategy; other ranks receive an empty state.
    fn state(&self) -> Result<StateDict> {
        let a = self.attached.as_ref().ok_or_else(|| not_attached(NAME))?;
        let mut state = StateDict::new();
        let moments = a.optimizer_state.read()?;
        for (number, bucket) in a.partition.buckets().iter().enumerate() {
            let gather = |own: Vec<f32>| -> Result<Vec<f32>> {
                let mut whole = vec![0.0; bucket.part * a.partition.world()];
                self.ranks.all_gather(&own, &mut whole)?;
                whole.truncate(bucket.len);
                Ok(whole)
            };
            let moments = moments.of_bucket(number, bucket, self.options.stage > 0, gather)?;
            if self.ranks.rank().0 == 0 {
                let specs = &a.specs[bucket.specs.clone()];
                saved::save_part(&mut state, specs, moments.each_ref().map(Vec::as_slice))?;
            }
        }
        if self.ranks.rank().0 == 0 {
            saved::save_step(&mut state, a.optimizer_state.step())?;
        }
        Ok(state)
    }

    /// Takes the complete state on every rank and keeps this rank's shards. Fails, without changing anything, if a
    /// tensor is missing, unexpected, misshapen, or holds values that are invalid for a moment.
    fn load_state(&mut self, state: &StateDict) -> Result<()> {
        let (rank, stage) = (self.ranks.rank().0, self.options.stage);
        let Attached { specs, partition, optimizer_state, .. } = self.attached()?;
        optimizer_state.load(&SavedOptimizerState::check(specs, state)?, specs, partition, rank, stage)
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
