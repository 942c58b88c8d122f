//! The needs of a run with a reward, before it is started: memory by item, and time by phase.
//!
//! Weights, gradients and optimizer state are counted exactly, from the shapes. The rest of a step's memory is a
//! formula whose factors were measured on the CPU in f32, where everything is f32 whatever the weights are stored as.
//! Choices that depend on the device's memory (dtype, tiles, the idle expert) are made by the functions that the model
//! itself uses.

mod memory;
mod needs;
mod presets;
#[cfg(test)]
mod tests;
mod time;

use std::collections::BTreeMap;

use burn::tensor::DType;
use roll_core::plan::PlanInput;
use roll_core::{Noise, Result};

pub use needs::needs;
pub use presets::Network;

use super::dit::{DitConfig, Trainable, lora_parameters};
use super::options::{IdleExpert, Placement, WanOptions};
use super::vae::{Fitting, Tiling, VaeConfig};

/// The networks of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Networks {
    /// Shape of the transformer; of each expert.
    pub dit: DitConfig,
    /// Transformers.
    pub experts: usize,
    /// Dtype in the files of the transformer.
    pub stored: DType,
    /// They have the matrices of its blocks in eight bits.
    pub eight_bits: bool,
    /// Shape of the VAE, which is resident in f32.
    pub vae: VaeConfig,
}

/// Tiles of the VAE.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tiles {
    /// These, or none.
    Fixed(Option<Tiling>),
    /// As the memory wants it.
    Fitting(Fitting),
}

/// Parts on a device, and their storage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OnDevice {
    /// Bytes of a frozen weight of the transformer, but for matrices in eight bits.
    pub weight_bytes: usize,
    /// Matrices of the blocks are in eight bits.
    pub eight_bits: bool,
    /// Bytes of an element of a block's input that waits for the pull.
    pub kept_bytes: usize,
    /// Bytes of a number between two layers of the VAE's decoder.
    pub decoding_bytes: usize,
    /// Where the idle expert is.
    pub idle: IdleExpert,
}

/// A request, in full.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The networks.
    pub networks: Networks,
    /// The videos, the passes of the algorithm, the ranks and the memory of a device.
    pub input: PlanInput,
    /// Where the frozen weights live; `Auto`: as the strategy's stage says.
    pub placement: Placement,
    /// The trained part of each trained expert.
    pub trainable: Trainable,
    /// Trained experts.
    pub trained_experts: usize,
    /// Tiles of the VAE.
    pub tiles: Tiles,
    /// Block inputs wait in host memory.
    pub offload_inputs: bool,
    /// Tokens of the prompt.
    pub text_len: usize,
    /// The device.
    pub storage: OnDevice,
}

/// CUDA's context, memory that an allocator cannot use, and the networks of rewards.
const RESERVE: usize = 2_000_000_000;
/// Trained steps that tiles are chosen for: those of the default trajectory.
const TRAINED_STEPS: usize = 4;

/// Memory that is left to the VAE on a GPU of `memory` bytes, beside `resident` bytes of weights. `kept_bytes` is that
/// of [`OnDevice`].
pub(super) fn fitting(
    memory: usize,
    resident: usize,
    dit: &DitConfig,
    kept_bytes: usize,
    options: &WanOptions,
) -> Fitting {
    let patch: usize = dit.patch.iter().product();
    let held = match options.use_gradient_checkpointing_offload {
        true => 0,
        false => (kept_bytes * dit.dim * (dit.layers + 2) * TRAINED_STEPS).div_ceil(patch),
    };
    Fitting { bytes: memory.saturating_sub(resident + RESERVE), held }
}

/// Bytes of an element of a block's input that waits for the pull, when products are taken in `products`.
pub(super) fn kept_bytes(products: DType) -> usize {
    if products == DType::BF16 { 2 } else { 4 }
}

/// Bytes of the weights of a transformer with `each` for an element; if `eight_bits`, of the matrices of its blocks
/// one, and four for the scale of each row.
pub(super) fn weight_bytes(shapes: &BTreeMap<String, Vec<usize>>, each: usize, eight_bits: bool) -> usize {
    let bytes = |(name, shape): (&String, &Vec<usize>)| match shape.as_slice() {
        [rows, columns] if eight_bits && name.starts_with("blocks.") => rows * (columns + 4),
        shape => each * shape.iter().product::<usize>(),
    };
    shapes.iter().map(bytes).sum()
}

impl Plan {
    /// Bytes of the frozen weights of one expert.
    pub(super) fn expert_bytes(&self) -> usize {
        weight_bytes(
            &self.networks.dit.weights().into_iter().collect(),
            self.storage.weight_bytes,
            self.storage.eight_bits,
        )
    }

    /// Bytes of the frozen weights of one block.
    pub(super) fn block_bytes(&self) -> usize {
        let weights = self.networks.dit.weights().into_iter().filter(|(name, _)| name.starts_with("blocks.0."));
        weight_bytes(&weights.collect(), self.storage.weight_bytes, self.storage.eight_bits)
    }

    /// Elements that are trained, over all experts.
    pub fn trained_elements(&self) -> Result<usize> {
        let one = match &self.trainable {
            Trainable::Frozen => 0,
            Trainable::Full => self.networks.dit_elements(),
            trainable @ (Trainable::Lora { .. } | Trainable::Layers { .. }) => {
                // Names and shapes do not depend on the draws.
                let (specs, _) = lora_parameters(&self.networks.dit, trainable, &Noise::new(0))?;
                specs.iter().map(|s| s.len()).sum()
            }
        };
        Ok(one * self.trained_experts)
    }

    /// Where the frozen weights live.
    pub fn placement(&self) -> Placement {
        match (self.placement, self.input.division.stage) {
            (Placement::Auto, 3) => Placement::Sharded,
            (Placement::Auto, _) => Placement::Resident,
            (given, _) => given,
        }
    }

    /// Height and width in pixels; those of the reference where the size is left to each clip.
    pub(super) fn size(&self) -> [usize; 2] {
        self.input.size.unwrap_or([480, 832])
    }

    /// Shape of the latents without channels: frames, height, width.
    pub(super) fn latents(&self) -> [usize; 3] {
        let (vae, [height, width]) = (&self.networks.vae, self.size());
        let space = vae.spatial_stride();
        [self.input.frames.saturating_sub(1) / vae.temporal_stride() + 1, height.div_ceil(space), width.div_ceil(space)]
    }

    /// Tiles of the VAE.
    pub fn tiling(&self) -> Option<Tiling> {
        match self.tiles {
            Tiles::Fixed(tiling) => tiling,
            Tiles::Fitting(fitting) => fitting.tiling(&self.networks.vae, self.input.frames, self.latents()),
        }
    }

    /// Transformers whose weights are on the device, when they are resident.
    pub(super) fn experts_here(&self) -> usize {
        match self.storage.idle {
            IdleExpert::Auto | IdleExpert::Keep => self.networks.experts,
            IdleExpert::Host | IdleExpert::Drop => 1,
        }
    }

    /// Tokens of a video.
    pub fn tokens(&self) -> usize {
        let [t, h, w] = self.latents();
        let [pt, ph, pw] = self.networks.dit.patch;
        t.div_ceil(pt) * h.div_ceil(ph) * w.div_ceil(pw)
    }

    /// Whether groups of `count` ranks can divide them.
    pub(super) fn divides_tokens(&self, count: usize) -> bool {
        let (ranks, heads) = (self.input.ranks(), self.networks.dit.heads);
        let allowed = self.input.division.stage < 3 || count == 1 || count == ranks;
        allowed && [ranks, self.tokens(), heads].iter().all(|n| n.is_multiple_of(count))
    }

    /// Tokens that a rank computes.
    pub fn own_tokens(&self) -> usize {
        self.tokens().div_ceil(self.input.division.token_ranks.max(1))
    }
}

impl Networks {
    /// Elements of one expert.
    pub fn dit_elements(&self) -> usize {
        self.dit.weights().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Elements of one block.
    pub(super) fn block_elements(&self) -> usize {
        let weights = self.dit.weights();
        let block = weights.iter().filter(|(name, _)| name.starts_with("blocks.0."));
        block.map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Elements of the VAE.
    pub fn vae_elements(&self) -> usize {
        self.vae.weights().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }
}
