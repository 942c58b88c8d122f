//! The device of a run and its use ([`Machine`]), on which the layout of a model depends.

use burn_tensor::Device;
use roll_core::plan::PlanInput;
use roll_core::{BuildContext, WeightPlacement};

use crate::precision::DeviceTraits;

/// The device of a run and how the run uses the device, as far as a layout depends on them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Traits of the device.
    pub device: DeviceTraits,
    /// Bytes of the device's memory, if it is a GPU and they are known.
    pub memory: Option<u64>,
    /// Where the strategy wants the frozen weights.
    pub placement: Option<WeightPlacement>,
    /// Number of passes that the algorithm records at a time, if it is known.
    pub recorded_passes: Option<usize>,
    /// Number of ranks that share the tokens of a pass.
    pub token_ranks: usize,
}

impl Machine {
    /// The machine that a model is opened on.
    pub fn of_run(context: &BuildContext, device: &Device) -> Self {
        Self {
            device: DeviceTraits::of(device),
            memory: roll_backends::device::memory::total(&context.backend),
            placement: context.placement,
            recorded_passes: context.recorded_passes,
            token_ranks: context.token_ranks.as_ref().map_or(1, |ranks| ranks.world_size()),
        }
    }

    /// The machine of a plan.
    pub fn planned(input: &PlanInput) -> Self {
        Self {
            device: DeviceTraits::planned(input.memory.is_some()),
            memory: input.memory,
            placement: input.division.placement,
            recorded_passes: Some(input.passes.held()),
            token_ranks: input.division.token_ranks,
        }
    }
}
