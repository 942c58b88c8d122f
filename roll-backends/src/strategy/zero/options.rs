//! Options of the strategy `zero`, under DeepSpeed's names.

use std::time::Duration;

use roll_core::keys::check_ranges;
use roll_core::plan::Division;
use roll_core::{ConfiguredOptions, Error, Kind, OptionNotes, Result, WeightPlacement};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::strategy::OptimizerPlace;

/// Options of the strategy `zero`; names as in DeepSpeed's `zero_optimization`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ZeroOptions {
    /// The parts that are divided among the ranks: 0 nothing, 1 the optimizer's state, 2 also the gradients, 3 also
    /// the frozen weights of models that can (`model.weight_store`).
    #[schemars(range(max = 3))]
    pub stage: u8,
    /// Elements that are reduced at a time. A tensor is never cut: a larger one is a bucket of its own.
    #[serde(deserialize_with = "elements")]
    #[schemars(range(min = 1))]
    pub reduce_bucket_size: usize,
    /// Elements that are gathered at a time. Buckets are shared by both directions: the smaller size counts.
    #[serde(deserialize_with = "elements")]
    #[schemars(range(min = 1))]
    pub allgather_bucket_size: usize,
    /// Elements that are updated at a time; bounds the buckets too.
    #[serde(deserialize_with = "elements")]
    #[schemars(range(min = 1))]
    pub sub_group_size: usize,
    /// Overlap of communication and computation: gradients are reduced while the pull goes on, bucket by bucket as they
    /// become whole, and sharded weights are gathered a block ahead. Results have the same bits either way. Weights
    /// that are streamed from files are always read a block ahead.
    pub overlap_comm: bool,
    /// Gradients of a bucket lie side by side; here they always do.
    pub contiguous_gradients: bool,
    /// `cpu` keeps the optimizer's state in host memory, and updates there; `none` leaves that to `optimizer_on`.
    pub offload_optimizer: Offload,
    /// Where the frozen weights live at stage 3; without effect below it, as in DeepSpeed.
    pub offload_param: Offload,
    /// Where AdamW keeps its moments and updates the parameters: each rank its own, on their device with `device`, in host
    /// memory with `host`. `auto`: on GPUs, if a rank has up to 268,435,456 parameters to update, enough for adapters; in
    /// host memory otherwise. Gradients are summed over the ranks in host memory either way.
    pub optimizer_on: OptimizerPlace,
    /// Ranks that work on one sample, each on its part of the tokens of a pass: for videos whose tokens are too many for one
    /// GPU (sequence parallelism as in DeepSpeed Ulysses). It must divide the ranks of the job, the heads of the transformer
    /// and its tokens. Ranks that stand next to each other are a group; every group has samples of its own. 1: every rank
    /// has.
    #[schemars(range(min = 1))]
    pub sequence_parallel_size: usize,
    /// The parameters of all ranks are compared every this many updates; 0 never compares.
    pub check_every: u64,
    /// Seconds that a rank waits for another before it gives the job up: longer than the longest step.
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
            optimizer_on: OptimizerPlace::default(),
            sequence_parallel_size: 1,
            check_every: 50,
            timeout_seconds: 1800,
        }
    }
}

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Strategy, name: "zero", notes }
}

fn notes(said: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let optimizer = said.idle(
        &["strategy.offload_optimizer.pin_memory"],
        "in host memory, the optimizer's state is in ordinary memory, where it is updated",
    );
    let frozen = said.idle(
        &["strategy.offload_param.pin_memory"],
        match said.is("strategy.offload_param.device", "none") {
            true => "`strategy.offload_param.device` is `none`",
            false => "frozen weights are never in pinned memory: those that are not on the device stay in their files",
        },
    );
    let below = said.value("strategy.stage").and_then(|stage| stage.as_u64()).is_some_and(|stage| stage < 3);
    let device = below.then(|| {
        said.idle(
            &["strategy.offload_param.device"],
            "as in DeepSpeed frozen weights stay on the device below stage 3, which streams them from their files, as \
             does `model.weight_store: streamed` at any stage",
        )
    });
    let contiguous = said.idle(&["strategy.contiguous_gradients"], "buckets are always contiguous");
    Ok([optimizer, frozen, device.flatten(), contiguous].into_iter().flatten().collect())
}

/// Where something lives when it is not in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Offload {
    /// `none`, `cpu` or `nvme`.
    pub device: OffloadDevice,
    /// Pinned host memory; has no effect on the CPU.
    pub pin_memory: bool,
}

/// Places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OffloadDevice {
    /// On the device where it is computed; the optimizer's state where `strategy.optimizer_on` says.
    #[default]
    None,
    /// In host memory; frozen weights in their memory-mapped files, which the system keeps in memory as it can.
    Cpu,
    /// On disk: the same memory-mapped files.
    Nvme,
}

impl ZeroOptions {
    /// Fails on values that can only be mistakes.
    pub(super) fn check(&self) -> Result<()> {
        let key = |name: &str, problem: String| Err(Error::config(format!("strategy.{name}"), problem));
        check_ranges("strategy", self)?;
        if self.offload_optimizer.device == OffloadDevice::Nvme {
            let problem = "the optimizer's state cannot be kept on disk; `cpu` keeps it in host memory";
            return key("offload_optimizer.device", problem.into());
        }
        if self.optimizer_on == OptimizerPlace::Device && self.optimizer_place() == OptimizerPlace::Host {
            let problem = "`strategy.offload_optimizer.device: cpu` keeps the optimizer's state in host memory: expected \
                           `host` or `auto`, found `device`";
            return key("optimizer_on", problem.into());
        }
        Ok(())
    }

    /// Where the optimizer works.
    pub(super) fn optimizer_place(&self) -> OptimizerPlace {
        match self.offload_optimizer.device {
            OffloadDevice::None => self.optimizer_on,
            OffloadDevice::Cpu | OffloadDevice::Nvme => OptimizerPlace::Host,
        }
    }

    /// Where frozen weights shall be. As in DeepSpeed, parameters are offloaded at stage 3 only; there, streaming needs
    /// no memory for them at all, and so comes before dividing them.
    pub(super) fn weight_placement(&self) -> Option<WeightPlacement> {
        match (self.offload_param.device, self.stage) {
            (OffloadDevice::Cpu | OffloadDevice::Nvme, 3) => Some(WeightPlacement::Streamed),
            (OffloadDevice::None, 3) => Some(WeightPlacement::Sharded),
            _ => None,
        }
    }

    /// The divided parts, for a plan.
    pub(super) fn division(&self) -> Division {
        Division {
            all_ranks: true,
            stage: self.stage,
            placement: self.weight_placement(),
            state_on_gpu: self.optimizer_place().most_on_gpu(),
            overlap_comm: self.overlap_comm,
            copies_parameters: false,
            bucket: self.bucket_size(),
            token_ranks: self.sequence_parallel_size,
        }
    }

    /// Elements of a bucket, at most.
    pub(super) fn bucket_size(&self) -> usize {
        self.reduce_bucket_size.min(self.allgather_bucket_size).min(self.sub_group_size)
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }
}

/// A whole number, also when it is written as DeepSpeed's users do: `5e8`.
fn elements<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<usize, D::Error> {
    let value = f64::deserialize(deserializer)?;
    match value >= 0.0 && value.fract() == 0.0 && value < 9e15 {
        true => Ok(value as usize),
        false => Err(serde::de::Error::custom(format!("expected a whole number of elements, found {value}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_offloaded_at_stage_3_only_as_in_deepspeed() {
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
