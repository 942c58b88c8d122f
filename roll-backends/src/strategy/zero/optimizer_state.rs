//! The optimizer state of a rank, on the device or in host memory.

use std::ops::Range;

use roll_core::{AdamUpdate, Communicator, DevicePart, DeviceUpdates, Model, ParameterSpec, Result};

use super::ZeroOptions;
use super::gradients::Gradients;
use super::parameter_access::ParameterAccess;
use super::partition::{Bucket, Partition};
use crate::optimizer::{AdamW, Moments};
use crate::strategy::saved::SavedOptimizerState;

/// The state, and the number of updates so far. It covers all parameters at stage 0, else the rank's shard of each
/// bucket.
pub(super) enum OptimizerState {
    /// Host memory, padded like the buckets.
    Host(Moments),
    /// Device memory, for all parameters.
    All { updates: Box<dyn DeviceUpdates>, step: u64 },
    /// Device memory, for the rank's shard of each bucket, without padding.
    Parts { parts: Vec<Box<dyn DevicePart>>, step: u64 },
}

pub(super) struct UpdateContext<'a> {
    pub(super) optimizer: &'a AdamW,
    pub(super) partition: &'a Partition,
    pub(super) gradients: &'a Gradients,
    pub(super) ranks: &'a dyn Communicator,
    /// Whether the state is replicated rather than sharded.
    pub(super) replicated: bool,
    pub(super) learning_rate: f64,
}

impl OptimizerState {
    /// Creates zero moments in the location that the options select.
    pub(super) fn zeros(
        options: &ZeroOptions,
        model: &mut dyn Model,
        partition: &Partition,
        ranks: &dyn Communicator,
    ) -> Result<Self> {
        let (rank, world) = (ranks.rank().0, ranks.world_size());
        let whole = options.stage == 0 || world == 1;
        let all = model.parameter_count();
        let count = if whole { all } else { partition.shard() };
        let Some(updates) = options.optimizer_location().updates(model, count)? else {
            let padded = if options.stage == 0 { partition.padded() } else { partition.shard() };
            return Ok(Self::Host(Moments::zeros(padded)));
        };
        tracing::info!("AdamW updates {count} of the {all} parameters on the device they are on");
        if whole {
            return Ok(Self::All { updates, step: 0 });
        }
        let part = |bucket: &Bucket| {
            let Range { start, end } = own(bucket, rank);
            updates.part(bucket.flat_at + start..bucket.flat_at + end)
        };
        Ok(Self::Parts { parts: partition.buckets().iter().map(part).collect::<Result<_>>()?, step: 0 })
    }

    /// Number of updates so far.
    pub(super) fn step(&self) -> u64 {
        match self {
            Self::Host(moments) => moments.step,
            Self::All { step, .. } | Self::Parts { step, .. } => *step,
        }
    }

    /// Updates the parameters of `model`, bucket by bucket.
    pub(super) fn update(&mut self, model: &mut dyn Model, context: &UpdateContext<'_>) -> Result<()> {
        match self {
            Self::Host(moments) => {
                moments.step += 1;
                context.update_in_host_memory(model, moments)
            }
            Self::All { updates, step } => {
                *step += 1;
                context.update_on_device(updates.as_mut(), &context.coefficients(*step))
            }
            Self::Parts { parts, step } => {
                *step += 1;
                context.update_parts_on_device(model, parts, &context.coefficients(*step))
            }
        }
    }

    /// The moments, to be read bucket by bucket in host memory.
    pub(super) fn read(&self) -> Result<ReadMoments<'_>> {
        Ok(match self {
            Self::Host(moments) => ReadMoments::Host(moments),
            Self::All { updates, .. } => ReadMoments::All(updates.read_moments()?),
            Self::Parts { parts, .. } => ReadMoments::Parts(parts),
        })
    }

    /// Replaces the state; a rank keeps its part.
    pub(super) fn load(
        &mut self,
        saved: &SavedOptimizerState<'_>,
        specs: &[ParameterSpec],
        partition: &Partition,
        rank: usize,
        stage: u8,
    ) -> Result<()> {
        let whole_bucket = |bucket: &Bucket| saved.flat(&specs[bucket.specs.clone()]);
        let buckets = partition.buckets();
        match self {
            Self::Host(moments) => {
                let mut new = Moments::zeros(moments.exp_avg.len());
                for bucket in buckets {
                    let moments = [&mut new.exp_avg, &mut new.exp_avg_sq];
                    for (mut whole, own) in whole_bucket(bucket)?.into_iter().zip(moments) {
                        whole.resize(bucket.part * partition.world(), 0.0);
                        let (first, part) = match stage {
                            0 => (bucket.padded_at, &whole[..]),
                            _ => (bucket.shard_at, &whole[bucket.own(rank)]),
                        };
                        own[first..first + part.len()].copy_from_slice(part);
                    }
                }
                new.step = saved.step;
                *moments = new;
            }
            Self::All { updates, step } => {
                updates.write_moments(saved.flat(specs)?.each_ref().map(Vec::as_slice))?;
                *step = saved.step;
            }
            Self::Parts { parts, step } => {
                for (part, bucket) in parts.iter_mut().zip(buckets) {
                    let whole = whole_bucket(bucket)?;
                    part.write_moments(whole.each_ref().map(|moments| &moments[own(bucket, rank)]))?;
                }
                *step = saved.step;
            }
        }
        Ok(())
    }
}

/// The shard of `rank` in a bucket, without padding.
fn own(bucket: &Bucket, rank: usize) -> Range<usize> {
    let Range { start, end } = bucket.own(rank);
    start.min(bucket.len)..end.min(bucket.len)
}

impl UpdateContext<'_> {
    fn coefficients(&self, step: u64) -> AdamUpdate {
        // Gradients have been scaled already, when they were summed.
        self.optimizer.coefficients(step, self.learning_rate, [1.0; 2])
    }

    fn update_in_host_memory(&self, model: &mut dyn Model, moments: &mut Moments) -> Result<()> {
        let (rank, world) = (self.ranks.rank().0, self.ranks.world_size());
        // Read again: a checkpoint or an import may have replaced the parameters since the last step.
        let mut values = ParameterAccess::open(model)?;
        for (i, bucket) in self.partition.buckets().iter().enumerate() {
            let mut parameters = values.read(bucket)?;
            parameters.resize(bucket.part * world, 0.0);
            // Every rank updates everything if the state is replicated, else its own shard.
            let (own, moments_at) = match self.replicated {
                true => (0..parameters.len(), bucket.padded_at),
                false => (bucket.own(rank), bucket.shard_at),
            };
            let updated = &mut parameters[own.clone()];
            self.gradients.with(i, rank, self.replicated, |gradients| {
                self.optimizer.update_part(self.learning_rate, updated, gradients, moments, moments_at);
            });
            if !self.replicated && world > 1 {
                let part = parameters[own].to_vec();
                self.ranks.all_gather(&part, &mut parameters)?;
            }
            values.write(bucket, &parameters[..bucket.len])?;
        }
        values.close()
    }

    /// Every rank updates all parameters, or there is only one rank.
    fn update_on_device(&self, updates: &mut dyn DeviceUpdates, update: &AdamUpdate) -> Result<()> {
        let mut all = Vec::new();
        for (i, bucket) in self.partition.buckets().iter().enumerate() {
            self.gradients.with(i, 0, self.replicated, |sums| all.extend_from_slice(&sums[..bucket.len]));
        }
        updates.discard();
        updates.add(&all)?;
        updates.update(update)
    }

    fn update_parts_on_device(
        &self,
        model: &mut dyn Model,
        parts: &mut [Box<dyn DevicePart>],
        update: &AdamUpdate,
    ) -> Result<()> {
        let rank = self.ranks.rank().0;
        let mut values = ParameterAccess::open(model)?;
        for (i, (bucket, part)) in self.partition.buckets().iter().zip(parts).enumerate() {
            let count = own(bucket, rank).len();
            let mut updated = self.gradients.with(i, rank, false, |sums| part.updated(&sums[..count], update))?;
            updated.resize(bucket.part, 0.0);
            let mut gathered = vec![0.0; bucket.part * self.ranks.world_size()];
            self.ranks.all_gather(&updated, &mut gathered)?;
            values.write(bucket, &gathered[..bucket.len])?;
        }
        values.close()
    }
}

/// The moments of a rank, read for a checkpoint.
pub(super) enum ReadMoments<'a> {
    Host(&'a Moments),
    All([Vec<f32>; 2]),
    Parts(&'a [Box<dyn DevicePart>]),
}

impl ReadMoments<'_> {
    /// The moments of bucket `number`, without padding. `sharded` says whether moments in host memory are sharded;
    /// `gather` assembles a bucket from the padded shards of all ranks.
    pub(super) fn of_bucket(
        &self,
        number: usize,
        bucket: &Bucket,
        sharded: bool,
        gather: impl Fn(Vec<f32>) -> Result<Vec<f32>>,
    ) -> Result<[Vec<f32>; 2]> {
        let slices = |moments: [&Vec<f32>; 2], range: Range<usize>| moments.map(|m| m[range.clone()].to_vec());
        let [exp_avg, exp_avg_sq] = match self {
            Self::Host(moments) => {
                let both = [&moments.exp_avg, &moments.exp_avg_sq];
                if !sharded {
                    return Ok(slices(both, bucket.padded_at..bucket.padded_at + bucket.len));
                }
                slices(both, bucket.in_shard())
            }
            Self::All(all) => return Ok(slices(all.each_ref(), bucket.flat_at..bucket.flat_at + bucket.len)),
            Self::Parts(parts) => {
                let mut shard = parts[number].read_moments()?;
                shard.iter_mut().for_each(|moments| moments.resize(bucket.part, 0.0));
                shard
            }
        };
        Ok([gather(exp_avg)?, gather(exp_avg_sq)?])
    }
}
