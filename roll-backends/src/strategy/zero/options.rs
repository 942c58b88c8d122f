//! Options of the strategy `zero`, under DeepSpeed's names.

use std::time::Duration;

use roll_core::keys::check_ranges;
use roll_core::plan::Division;
use roll_core::{Error, IdleKeys, Kind, OptionNotes, Result, WeightPlacement, When};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::strategy::OptimizerLocation;

/// Options of the strategy `zero`; names as in DeepSpeed's `zero_optimization`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ZeroOptions {
    /// What is sharded over the ranks. 0: nothing. 1: the optimizer state. 2: also the gradients. 3: also the frozen
    /// weights, for models that support it (`model.weight_store`).
    #[schemars(range(max = 3))]
    pub stage: u8,
    /// Maximum number of elements that are reduced at a time. Tensors are not divided: a larger one is a bucket of its
    /// own.
    #[schemars(range(min = 1))]
    pub reduce_bucket_size: usize,
    /// Maximum number of elements that are all-gathered at a time. Reduction and all-gather use the same buckets: the
    /// smaller size applies.
    #[schemars(range(min = 1))]
    pub allgather_bucket_size: usize,
    /// Maximum number of elements that are updated at a time; also bounds the buckets.
    #[schemars(range(min = 1))]
    pub sub_group_size: usize,
    /// Overlap of communication and computation: each gradient bucket is reduced as soon as it is complete, during the
    /// backward pass, and sharded weights are prefetched by one block. Results are bit-identical either way. Weights
    /// that are streamed from files are always prefetched by one block.
    pub overlap_comm: bool,
    /// Contiguous gradients in a bucket; here they always are.
    pub contiguous_gradients: bool,
    /// `cpu` keeps the optimizer state in host memory and updates there; `none` leaves the location to `optimizer_on`.
    pub offload_optimizer: Offload,
    /// Location of the frozen weights at stage 3; no effect below it, as in DeepSpeed.
    pub offload_param: Offload,
    /// Location of AdamW's moments and updates on each rank. `device`: the parameters' device. `host`: host memory.
    /// `auto`: the GPU if a rank updates at most 268,435,456 parameters, which is enough for adapters; host memory
    /// otherwise. Several ranks sum their gradients in host memory in any case.
    pub optimizer_on: OptimizerLocation,
    /// Number of ranks that work on one sample, each on its part of the tokens of a pass. This is sequence parallelism
    /// as in DeepSpeed Ulysses, for videos with too many tokens for one GPU. The number must divide the number of ranks
    /// of the job, the heads of the transformer and its tokens. Consecutive ranks form a group, and each group has its
    /// own samples. With 1, each rank has its own samples.
    #[schemars(range(min = 1))]
    pub sequence_parallel_size: usize,
    /// Number of updates between comparisons of the parameters of all ranks; 0 never compares.
    pub check_every: u64,
    /// Seconds that a rank waits for other ranks before it fails; must exceed the longest step.
    #[schemars(range(min = 1))]
    pub timeout_seconds: u64,
}

impl Default for ZeroOptions {
    fn default() -> Self {
        Self {
            stage: 2,
            reduce_bucket_size: 1 << 24,
            allgather_bucket_size: 1 << 24,
            sub_group_size: 1_000_000_000,
            overlap_comm: true,
            contiguous_gradients: true,
            offload_optimizer: Offload::default(),
            offload_param: Offload::default(),
            optimizer_on: OptimizerLocation::default(),
            sequence_parallel_size: 1,
            check_every: 50,
            timeout_seconds: 1800,
        }
    }
}

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Strategy, name: "zero", idle: IDLE, more: None }
}

const IDLE: &[IdleKeys] = &[
    IdleKeys {
        keys: &["strategy.offload_optimizer.pin_memory"],
        when: When::Always,
        because: "in host memory, the optimizer's state is in ordinary memory, where it is updated",
    },
    IdleKeys {
        keys: &["strategy.offload_param.pin_memory"],
        when: When::Is("strategy.offload_param.device", &["none"]),
        because: "`strategy.offload_param.device` is `none`",
    },
    IdleKeys {
        keys: &["strategy.offload_param.pin_memory"],
        when: When::Always,
        because: "frozen weights are never in pinned memory: those that are not on the device stay in their files",
    },
    IdleKeys {
        keys: &["strategy.offload_param.device"],
        when: When::IsNot("strategy.stage", &["3"]),
        because: "as in DeepSpeed frozen weights stay on the device below stage 3, which streams them from their \
                  files, as does `model.weight_store: streamed` at any stage",
    },
    IdleKeys { keys: &["strategy.contiguous_gradients"], when: When::Always, because: "buckets are always contiguous" },
];

/// Where data is kept while it is not used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Offload {
    /// `none`, `cpu` or `nvme`.
    pub device: OffloadDevice,
    /// Pinned host memory; no effect on the CPU.
    pub pin_memory: bool,
}

/// A location.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OffloadDevice {
    /// The device; the optimizer state lies where `strategy.optimizer_on` says.
    #[default]
    None,
    /// Host memory; frozen weights stay in their memory-mapped files, which the operating system caches in free memory.
    Cpu,
    /// Disk: the same memory-mapped files.
    Nvme,
}

impl ZeroOptions {
    /// Fails on invalid values and combinations.
    pub(super) fn check(&self) -> Result<()> {
        check_ranges("strategy", self)?;
        if self.offload_optimizer.device == OffloadDevice::Nvme {
            let problem = "the optimizer's state cannot be kept on disk; `cpu` keeps it in host memory";
            return Err(Error::config("strategy.offload_optimizer.device", problem));
        }
        if self.optimizer_on == OptimizerLocation::Device && self.optimizer_location() == OptimizerLocation::Host {
            let problem = "`strategy.offload_optimizer.device: cpu` keeps the optimizer's state in host memory: expected \
                           `host` or `auto`, found `device`";
            return Err(Error::config("strategy.optimizer_on", problem));
        }
        Ok(())
    }

    /// The location of the optimizer's state that follows from `offload_optimizer` and `optimizer_on`.
    pub(super) fn optimizer_location(&self) -> OptimizerLocation {
        match self.offload_optimizer.device {
            OffloadDevice::None => self.optimizer_on,
            OffloadDevice::Cpu | OffloadDevice::Nvme => OptimizerLocation::Host,
        }
    }

    /// The placement of frozen weights; `None` leaves it to the model. As in DeepSpeed, parameters are offloaded at
    /// stage 3 only. Streaming takes precedence over sharding, because it needs no host memory for the weights at all.
    pub(super) fn weight_placement(&self) -> Option<WeightPlacement> {
        match (self.offload_param.device, self.stage) {
            (OffloadDevice::Cpu | OffloadDevice::Nvme, 3) => Some(WeightPlacement::Streamed),
            (OffloadDevice::None, 3) => Some(WeightPlacement::Sharded),
            _ => None,
        }
    }

    /// The division of memory over the ranks, for a plan.
    pub(super) fn division(&self) -> Division {
        Division {
            // `zero` trains on every rank of the job, `single` on one.
            all_ranks: true,
            stage: self.stage,
            placement: self.weight_placement(),
            state_on_gpu: self.optimizer_location().max_on_gpu(),
            overlap_comm: self.overlap_comm,
            copies_parameters: false,
            bucket: self.bucket_size(),
            token_ranks: self.sequence_parallel_size,
        }
    }

    /// Maximum number of elements of a bucket.
    pub(super) fn bucket_size(&self) -> usize {
        self.reduce_bucket_size.min(self.allgather_bucket_size).min(self.sub_group_size)
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_offloaded_only_at_stage_3() {
        let cpu = Offload { device: OffloadDevice::Cpu, pin_memory: true };
        let at = |stage: u8, offload_param: &Offload| {
            let options = ZeroOptions { stage, offload_param: offload_param.clone(), ..ZeroOptions::default() };
            (options.weight_placement(), options.division().placement)
        };
        for stage in 0..3 {
            assert_eq!(at(stage, &cpu), (None, None), "stage {stage}");
        }
        assert_eq!(at(3, &cpu).0, Some(WeightPlacement::Streamed));
        assert_eq!(at(3, &Offload::default()).0, Some(WeightPlacement::Sharded));
    }
}
