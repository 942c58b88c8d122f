//! The sums of gradients and the optimizer state of a rank, on the parameters' device or in host memory.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use roll_core::{AdamUpdate, Communicator, DeviceUpdates, Model, ParameterSpec, Result, StateDict};

use super::ZeroOptions;
use super::gradients::Gradients;
use super::parameter_access::ParameterAccess;
use super::partition::{Bucket, Partition};
use super::reducer::GradientReducer;
use super::shard::Shard;
use crate::optimizer::AdamW;
use crate::overlap::OverlappedRanks;
use crate::strategy::saved::{self, SavedOptimizerState};

/// Sums of gradients, and AdamW's moments.
pub(super) enum OptimizerState {
    /// Moments of all parameters on their device. A rank alone sums its gradients there too; nothing passes through
    /// host memory.
    Device { updates: Box<dyn DeviceUpdates>, sums: Option<HostSums> },
    /// Moments of each bucket: of all its parameters at stage 0, else of the rank's shard.
    Shards { shards: Vec<Shard>, sums: HostSums },
}

/// Sums of gradients in host memory.
pub(super) struct HostSums {
    partition: Arc<Partition>,
    gradients: Arc<Gradients>,
    ranks: Arc<OverlappedRanks>,
    /// Reduces the gradients of several ranks.
    reducer: Option<Arc<GradientReducer>>,
    /// Whether every rank updates all parameters, rather than its shards.
    replicated: bool,
}

/// An update, whose gradients are multiplied by both factors of `scale`; host sums have been multiplied by the first
/// one already ([`OptimizerState::norm`]).
pub(super) struct Update<'a> {
    pub(super) optimizer: &'a AdamW,
    /// Number of this update, from 1 on.
    pub(super) step: u64,
    pub(super) learning_rate: f64,
    pub(super) scale: [f64; 2],
}

impl OptimizerState {
    /// Creates zero sums and moments in the location that the options select.
    pub(super) fn zeros(
        options: &ZeroOptions,
        model: &mut dyn Model,
        partition: &Arc<Partition>,
        ranks: &Arc<OverlappedRanks>,
    ) -> Result<Self> {
        let alone = ranks.world_size() == 1;
        let whole = options.stage == 0 || alone;
        let all = model.parameter_count();
        let count = if whole { all } else { partition.shard() };
        let updates = options.optimizer_location().updates(model, count)?;
        if updates.is_some() {
            tracing::info!("AdamW updates the parameters on the device they are on: {count} of {all} on this rank");
        }
        if let Some(updates) = updates {
            if whole {
                let sums = (!alone).then(|| HostSums::zeros(options, model.parameters(), partition, ranks));
                return Ok(Self::Device { updates, sums });
            }
            let sums = HostSums::zeros(options, model.parameters(), partition, ranks);
            let part = |bucket: &Bucket| {
                let Range { start, end } = sums.own(bucket);
                updates.part(bucket.flat_at + start..bucket.flat_at + end).map(Shard::Device)
            };
            let shards = partition.buckets().iter().map(part).collect::<Result<_>>()?;
            return Ok(Self::Shards { shards, sums });
        }
        let sums = HostSums::zeros(options, model.parameters(), partition, ranks);
        let shards = partition.buckets().iter().map(|bucket| Shard::in_host_memory(sums.own(bucket).len())).collect();
        Ok(Self::Shards { shards, sums })
    }

    fn sums(&self) -> Option<&HostSums> {
        match self {
            Self::Device { sums, .. } => sums.as_ref(),
            Self::Shards { sums, .. } => Some(sums),
        }
    }

    /// The reducer of the gradients of several ranks.
    pub(super) fn reducer(&self) -> Option<&Arc<GradientReducer>> {
        self.sums()?.reducer.as_ref()
    }

    /// Takes the gradients of `model` and adds them to the sums.
    pub(super) fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        match self {
            Self::Device { sums: Some(sums), .. } | Self::Shards { sums, .. } => sums.accumulate(model),
            Self::Device { updates, sums: None } => match model.parts().and_then(|parts| parts.device_updates()) {
                Some(_) => updates.accumulate(),
                // A wrapper of the model may keep gradients in host memory.
                None => {
                    let mut gradients = vec![0.0; model.parameter_count()];
                    model.take_gradients(&mut gradients)?;
                    updates.add(&gradients)
                }
            },
        }
    }

    /// Clears the sums.
    pub(super) fn clear(&mut self) {
        match self {
            Self::Device { sums: Some(sums), .. } | Self::Shards { sums, .. } => sums.gradients.clear(),
            Self::Device { updates, sums: None } => updates.discard(),
        }
    }

    /// The norm of the gradient over all ranks, times `scale`. Host sums are multiplied by `scale`.
    pub(super) fn norm(&mut self, scale: f64) -> Result<f64> {
        Ok(match self {
            Self::Device { sums: Some(sums), .. } | Self::Shards { sums, .. } => {
                sums.gradients.scale(scale);
                sums.gradients.sum_of_squares(sums.ranks.as_ref())?.sqrt()
            }
            Self::Device { updates, sums: None } => updates.sum_of_squares()?.sqrt() * scale.abs(),
        })
    }

    /// Updates moments and parameters by the sums.
    pub(super) fn update(&mut self, model: &mut dyn Model, update: &Update<'_>) -> Result<()> {
        let Update { optimizer, step, learning_rate, scale } = *update;
        if let Some(sums) = self.sums() {
            sums.gradients.scale(scale[1]);
        }
        let scaled = optimizer.coefficients(step, learning_rate, [1.0; 2]);
        match self {
            Self::Shards { shards, sums } => sums.update(model, shards, &scaled),
            Self::Device { updates, sums: Some(sums) } => {
                updates.discard();
                updates.add(&sums.all())?;
                updates.update(&scaled)
            }
            Self::Device { updates, sums: None } => updates.update(&optimizer.coefficients(step, learning_rate, scale)),
        }
    }

    /// Adds the moments of all ranks to `state`, on rank 0; must be called by all ranks.
    pub(super) fn save(&self, specs: &[ParameterSpec], state: &mut StateDict) -> Result<()> {
        let saves = self.sums().is_none_or(|sums| sums.ranks.rank().0 == 0);
        match self {
            Self::Device { updates, .. } if saves => {
                saved::save_part(state, specs, updates.read_moments()?.each_ref().map(Vec::as_slice))
            }
            Self::Device { .. } => Ok(()),
            Self::Shards { shards, sums } => {
                for (bucket, shard) in sums.partition.buckets().iter().zip(shards) {
                    let [first, second] = shard.read()?;
                    let whole = [sums.gather(bucket, first)?, sums.gather(bucket, second)?];
                    if saves {
                        saved::save_part(state, &specs[bucket.specs.clone()], whole.each_ref().map(AsRef::as_ref))?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Replaces the moments; a rank keeps its shards.
    pub(super) fn load(&mut self, saved: &SavedOptimizerState<'_>, specs: &[ParameterSpec]) -> Result<()> {
        match self {
            Self::Device { updates, .. } => updates.write_moments(saved.flat(specs)?.each_ref().map(Vec::as_slice)),
            Self::Shards { shards, sums } => {
                for (bucket, shard) in sums.partition.buckets().iter().zip(shards) {
                    let whole = saved.flat(&specs[bucket.specs.clone()])?;
                    // Copied, so that the memory of the whole bucket is free again.
                    shard.write(whole.map(|moments| moments[sums.own(bucket)].to_vec()))?;
                }
                Ok(())
            }
        }
    }
}

impl HostSums {
    fn zeros(
        options: &ZeroOptions,
        specs: &[ParameterSpec],
        partition: &Arc<Partition>,
        ranks: &Arc<OverlappedRanks>,
    ) -> Self {
        let gradients = Arc::new(Gradients::new(partition.clone(), options.stage < 2));
        let reducer = (ranks.world_size() > 1).then(|| {
            let service = ranks.register(gradients.clone());
            Arc::new(GradientReducer::new(partition.clone(), specs, ranks.clone(), service))
        });
        let (partition, ranks) = (partition.clone(), ranks.clone());
        Self { partition, gradients, ranks, reducer, replicated: options.stage == 0 }
    }

    fn accumulate(&self, model: &mut dyn Model) -> Result<()> {
        let Some(reducer) = &self.reducer else { return self.gradients.take(model) };
        if let Some(parts) = model.parts() {
            parts.deliver_gradients(None);
        }
        reducer.finish(model)
    }

    /// The elements of a bucket that this rank updates, without padding.
    fn own(&self, bucket: &Bucket) -> Range<usize> {
        if self.replicated {
            return 0..bucket.len;
        }
        let Range { start, end } = bucket.own(self.ranks.rank().0);
        start.min(bucket.len)..end.min(bucket.len)
    }

    /// Assembles a bucket from this rank's elements of it and those of the other ranks.
    fn gather<'a>(&self, bucket: &Bucket, own: Cow<'a, [f32]>) -> Result<Cow<'a, [f32]>> {
        let world = self.ranks.world_size();
        if self.replicated || world == 1 {
            return Ok(own);
        }
        let mut own = own.into_owned();
        own.resize(bucket.part, 0.0);
        let mut whole = vec![0.0; bucket.part * world];
        self.ranks.all_gather(&own, &mut whole)?;
        whole.truncate(bucket.len);
        Ok(whole.into())
    }

    /// Updates the parameters of `model`, bucket by bucket.
    fn update(&self, model: &mut dyn Model, shards: &mut [Shard], update: &AdamUpdate) -> Result<()> {
        let rank = self.ranks.rank().0;
        // Read again: a checkpoint or an import may have replaced the parameters since the last step.
        let mut values = ParameterAccess::open(model)?;
        for (number, (bucket, shard)) in self.partition.buckets().iter().zip(shards).enumerate() {
            let own = self.own(bucket);
            let read = || {
                let mut values = values.read(bucket)?;
                values.truncate(own.end);
                values.drain(..own.start);
                Ok(values)
            };
            let updated = self.gradients.with(number, rank, self.replicated, |gradients| {
                shard.updated(read, &gradients[..own.len()], update)
            })?;
            values.write(bucket, &self.gather(bucket, updated.into())?)?;
        }
        values.close()
    }

    /// The sums of all parameters, in the flat layout; they must be replicated.
    fn all(&self) -> Vec<f32> {
        let mut all = Vec::new();
        for (number, bucket) in self.partition.buckets().iter().enumerate() {
            self.gradients.with(number, 0, true, |sums| all.extend_from_slice(&sums[..bucket.len]));
        }
        all
    }
}
