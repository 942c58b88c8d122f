//! The sums of gradients and the optimizer state of a rank, on the parameters' device or in host memory.
//!
//! | ranks   | stage  | sums of gradients | moments, on the device or in host memory      |
//! |---------|--------|-------------------|-----------------------------------------------|
//! | one     | any    | as the moments    | of all parameters                             |
//! | several | 0      | in host memory    | of all parameters, on every rank              |
//! | several | 1 to 3 | in host memory    | of the rank's shard of each bucket            |

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use roll_core::{AdamUpdate, Communicator, DeviceUpdates, GradientSink, Model, ParameterSpec, Result, StateDict};

use super::ZeroOptions;
use super::gradients::{BucketSums, Gradients};
use super::local_sums::LocalSums;
use super::parameter_access::ParameterAccess;
use super::partition::{Bucket, Partition};
use super::reducer::GradientReducer;
use super::shard::Shard;
use crate::optimizer::AdamW;
use crate::overlap::OverlappedRanks;
use crate::strategy::saved::{self, SavedOptimizerState};

/// Sums of gradients, and AdamW's moments.
pub(super) enum OptimizerState {
    /// The device has the moments of all parameters. A single rank sums its gradients there too (`sums` is `None`), and
    /// nothing passes through host memory.
    Device { updates: Box<dyn DeviceUpdates>, sums: Option<HostSums> },
    /// One [`Shard`] per bucket has the moments: at stage 0 of the whole bucket, at other stages of the rank's shard of
    /// the bucket.
    Shards { shards: Vec<Shard>, sums: HostSums },
}

/// Sums of gradients in host memory.
pub(super) struct HostSums {
    partition: Arc<Partition>,
    gradients: Arc<Gradients>,
    ranks: Arc<OverlappedRanks>,
    receiver: GradientReceiver,
    /// Whether every rank updates all parameters (stage 0), rather than its shards.
    updates_all: bool,
}

/// Takes the gradients that a model delivers during a backward pass, and those that it kept after it.
pub(super) enum GradientReceiver {
    /// Reduces them over several ranks.
    Reducer(Arc<GradientReducer>),
    /// Adds them to the sums of a single rank.
    Local(Arc<LocalSums>),
}

impl GradientReceiver {
    /// The sink of deliveries, which accepts nothing until it is opened.
    pub(super) fn sink(&self) -> Arc<dyn GradientSink> {
        match self {
            Self::Reducer(reducer) => reducer.clone(),
            Self::Local(sums) => sums.clone(),
        }
    }

    /// Accepts gradients from now on, which must be the last ones of their parameters in this step.
    pub(super) fn open(&self) {
        match self {
            Self::Reducer(reducer) => reducer.open(),
            Self::Local(sums) => sums.open(),
        }
    }

    /// Accepts no more gradients.
    pub(super) fn close(&self) {
        match self {
            Self::Reducer(reducer) => reducer.close(),
            Self::Local(sums) => sums.close(),
        }
    }

    fn finish(&self, model: &mut dyn Model) -> Result<()> {
        match self {
            Self::Reducer(reducer) => reducer.finish(model),
            Self::Local(sums) => sums.finish(model),
        }
    }
}

/// The arguments of an update. Gradients are multiplied by `scale` and by `clip`; sums in host memory have been
/// multiplied by `scale` before ([`OptimizerState::norm`]).
pub(super) struct Update<'a> {
    pub(super) optimizer: &'a AdamW,
    /// Number of this update, from 1 on.
    pub(super) step: u64,
    pub(super) learning_rate: f64,
    /// Factor for the mean over samples.
    pub(super) scale: f64,
    /// Factor that clips the gradient.
    pub(super) clip: f64,
}

impl OptimizerState {
    /// Creates zero sums and moments in the location that the options select.
    pub(super) fn zeros(
        options: &ZeroOptions,
        model: &mut dyn Model,
        partition: &Arc<Partition>,
        ranks: &Arc<OverlappedRanks>,
    ) -> Result<Self> {
        let is_single_rank = ranks.world_size() == 1;
        let has_all_moments = options.stage == 0 || is_single_rank;
        let total = model.parameter_count();
        let count = if has_all_moments { total } else { partition.shards_len() };
        let device_updates = options.optimizer_location().updates(model, count)?;
        if device_updates.is_some() {
            tracing::info!("AdamW updates the parameters on the device they are on: {count} of {total} on this rank");
        }
        let host_sums = || HostSums::zeros(options, model.parameters(), partition, ranks);
        let buckets = partition.buckets().iter();
        match device_updates {
            // On the device, all parameters.
            Some(updates) if has_all_moments => {
                let sums = (!is_single_rank).then(host_sums);
                Ok(Self::Device { updates, sums })
            }
            // On the device, this rank's shard of each bucket.
            Some(updates) => {
                let sums = host_sums();
                let shard = |bucket: &Bucket| {
                    let Range { start, end } = sums.own_range(bucket);
                    updates.part(bucket.flat_at + start..bucket.flat_at + end).map(Shard::Device)
                };
                let shards = buckets.map(shard).collect::<Result<_>>()?;
                Ok(Self::Shards { shards, sums })
            }
            // In host memory.
            None => {
                let sums = host_sums();
                let shards = buckets.map(|bucket| Shard::in_host_memory(sums.own_range(bucket).len())).collect();
                Ok(Self::Shards { shards, sums })
            }
        }
    }

    /// The sums in host memory, if they are there.
    fn sums(&self) -> Option<&HostSums> {
        match self {
            Self::Device { sums, .. } => sums.as_ref(),
            Self::Shards { sums, .. } => Some(sums),
        }
    }

    /// The receiver of delivered gradients. `None` if they are summed on the parameters' device.
    pub(super) fn receiver(&self) -> Option<&GradientReceiver> {
        Some(&self.sums()?.receiver)
    }

    /// Takes the gradients of `model` and adds them to the sums.
    pub(super) fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        match self {
            Self::Device { sums: Some(sums), .. } | Self::Shards { sums, .. } => sums.accumulate(model),
            Self::Device { updates, sums: None } => match model.parts().and_then(|parts| parts.device_updates()) {
                Some(_) => updates.accumulate(),
                // The model is a wrapper that collects its gradients in host memory.
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

    /// The norm of the gradient over all ranks, times `scale`. Sums in host memory are multiplied by `scale`; sums on
    /// the device are not, and are scaled by [`OptimizerState::update`].
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
        let Update { optimizer, step, learning_rate, scale, clip } = *update;
        if let Some(sums) = self.sums() {
            sums.gradients.scale(clip);
        }
        // Sums in host memory now have both factors.
        let host_coefficients = optimizer.coefficients(step, learning_rate, [1.0; 2]);
        match self {
            Self::Shards { shards, sums } => sums.update(model, shards, &host_coefficients),
            Self::Device { updates, sums: Some(sums) } => {
                updates.discard();
                updates.add(&sums.all_sums())?;
                updates.update(&host_coefficients)
            }
            Self::Device { updates, sums: None } => {
                updates.update(&optimizer.coefficients(step, learning_rate, [scale, clip]))
            }
        }
    }

    /// Adds the moments of all parameters to `state` on rank 0. Must be called by all ranks.
    pub(super) fn save(&self, specs: &[ParameterSpec], state: &mut StateDict) -> Result<()> {
        let is_rank_0 = self.sums().is_none_or(|sums| sums.ranks.rank().0 == 0);
        match self {
            Self::Device { updates, .. } if is_rank_0 => {
                saved::save_part(state, specs, updates.read_moments()?.each_ref().map(Vec::as_slice))
            }
            Self::Device { .. } => Ok(()),
            Self::Shards { shards, sums } => {
                for (bucket, shard) in sums.partition.buckets().iter().zip(shards) {
                    let [first, second] = shard.read()?;
                    let whole = [sums.gather(bucket, first)?, sums.gather(bucket, second)?];
                    if is_rank_0 {
                        saved::save_part(state, &specs[bucket.specs.clone()], whole.each_ref().map(AsRef::as_ref))?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Replaces the moments. `saved` has the moments of all parameters; a rank keeps its shards of them.
    pub(super) fn load(&mut self, saved: &SavedOptimizerState<'_>, specs: &[ParameterSpec]) -> Result<()> {
        match self {
            Self::Device { updates, .. } => updates.write_moments(saved.flat(specs)?.each_ref().map(Vec::as_slice)),
            Self::Shards { shards, sums } => {
                for (bucket, shard) in sums.partition.buckets().iter().zip(shards) {
                    let whole = saved.flat(&specs[bucket.specs.clone()])?;
                    // Copied, so that the memory of the whole bucket is freed.
                    shard.write(whole.map(|moments| moments[sums.own_range(bucket)].to_vec()))?;
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
        let is_replicated = options.stage <= 1;
        let gradients = Arc::new(Gradients::new(partition.clone(), is_replicated));
        let receiver = if ranks.world_size() > 1 {
            let service = ranks.register(gradients.clone());
            let reducer = GradientReducer::new(partition.clone(), specs, ranks.clone(), service);
            GradientReceiver::Reducer(Arc::new(reducer))
        } else {
            GradientReceiver::Local(Arc::new(LocalSums::new(gradients.clone(), specs)))
        };
        let (partition, ranks) = (partition.clone(), ranks.clone());
        Self { partition, gradients, ranks, receiver, updates_all: options.stage == 0 }
    }

    fn accumulate(&self, model: &mut dyn Model) -> Result<()> {
        if let Some(parts) = model.parts() {
            let no_sink = None;
            parts.deliver_gradients(no_sink);
        }
        self.receiver.finish(model)
    }

    /// The elements of a bucket that this rank updates, without padding.
    fn own_range(&self, bucket: &Bucket) -> Range<usize> {
        if self.updates_all {
            return 0..bucket.len;
        }
        let Range { start, end } = bucket.shard_of(self.ranks.rank().0);
        start.min(bucket.len)..end.min(bucket.len)
    }

    /// Assembles the values of a whole bucket. Each rank passes the values of its own elements
    /// ([`HostSums::own_range`]).
    fn gather<'a>(&self, bucket: &Bucket, own_values: Cow<'a, [f32]>) -> Result<Cow<'a, [f32]>> {
        let world = self.ranks.world_size();
        if self.updates_all || world == 1 {
            return Ok(own_values);
        }
        let mut shard = own_values.into_owned();
        shard.resize(bucket.shard_len, 0.0);
        let mut whole = vec![0.0; bucket.shard_len * world];
        self.ranks.all_gather(&shard, &mut whole)?;
        whole.truncate(bucket.len);
        Ok(whole.into())
    }

    /// Updates the parameters of `model`, bucket by bucket.
    fn update(&self, model: &mut dyn Model, shards: &mut [Shard], update: &AdamUpdate) -> Result<()> {
        let rank = self.ranks.rank().0;
        // Read at each update, because a checkpoint or an import may have replaced the parameters since the last one.
        let mut parameters = ParameterAccess::open(model)?;
        for (number, (bucket, shard)) in self.partition.buckets().iter().zip(shards).enumerate() {
            let own_range = self.own_range(bucket);
            let read_own = || {
                let mut values = parameters.read(bucket)?;
                values.truncate(own_range.end);
                values.drain(..own_range.start);
                Ok(values)
            };
            let which = if self.updates_all { BucketSums::Whole } else { BucketSums::ShardOf(rank) };
            let updated = self.gradients.read_bucket(number, which, |gradients| {
                shard.updated(read_own, &gradients[..own_range.len()], update)
            })?;
            parameters.write(bucket, &self.gather(bucket, updated.into())?)?;
        }
        parameters.close()
    }

    /// The sums of all parameters, in the flat layout. Requires that every rank has all sums (stages 0 and 1).
    fn all_sums(&self) -> Vec<f32> {
        let mut all_sums = Vec::new();
        for (number, bucket) in self.partition.buckets().iter().enumerate() {
            self.gradients
                .read_bucket(number, BucketSums::Whole, |sums| all_sums.extend_from_slice(&sums[..bucket.len]));
        }
        all_sums
    }
}
