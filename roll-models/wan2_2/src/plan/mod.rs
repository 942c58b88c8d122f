//! Estimates of a training run before it is started: memory by kind of tensor, and time by phase.
//!
//! Weights, gradients and optimizer state are counted exactly, from the shapes. The rest of a step's memory is a
//! formula whose factors were measured on the CPU, where all values are f32 whatever the storage dtype. Choices that
//! depend on the device's memory (dtype, tiles, the idle expert) are made by the functions that the model itself uses.

mod memory;
mod needs;
mod presets;
#[cfg(test)]
mod tests;
mod time;

use burn_tensor::DType;
use roll_backends::EightBits;
use roll_backends::weights::HostStore;
use roll_core::plan::PlanInput;
use roll_core::{Noise, Result};

pub use needs::needs;
pub use presets::PublishedModel;

use super::dit::{DitConfig, Trainable, lora_parameters};
use super::options::{IdleExpert, Placement, WanOptions};
use super::vae::{MemoryBudget, Tiling, VaeConfig};

/// The networks of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Networks {
    /// Sizes of each transformer.
    pub dit: DitConfig,
    /// Number of transformers.
    pub experts: usize,
    /// Dtype of dense weights in the files of the transformers.
    pub stored: DType,
    /// The format of the matrices of the blocks, if the files have them in eight bits.
    pub eight_bits: Option<EightBits>,
    /// Sizes of the VAE, which is resident in f32.
    pub vae: VaeConfig,
}

/// Bytes per element on a device, and the location of the idle expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceStorage {
    /// Bytes per frozen weight of the transformer, except matrices in eight bits.
    pub weight_bytes: usize,
    /// Whether the matrices of the blocks are in eight bits.
    pub eight_bits: bool,
    /// Bytes per element of a block's input that is stored for the pullback.
    pub block_input_bytes: usize,
    /// Bytes per element between two layers of the VAE's decoder.
    pub decoder_element_bytes: usize,
    /// Location of the idle expert.
    pub idle: IdleExpert,
}

/// A run whose memory and time are estimated.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The networks.
    pub networks: Networks,
    /// The videos, the passes of the algorithm, the ranks and the memory of a device.
    pub input: PlanInput,
    /// Location of the frozen weights. `Auto`: sharded with ZeRO stage 3, else resident.
    pub placement: Placement,
    /// The trained part of each trained expert.
    pub trainable: Trainable,
    /// Whether passes of the KL's reference use the adapter that training starts from.
    pub keeps_start: bool,
    /// Names of the trained experts, `dit` (high noise) and `dit2`.
    pub trained_experts: Vec<String>,
    /// Tiles of the VAE; `None` processes whole frames.
    pub tiling: Option<Tiling>,
    /// Checkpoints of the decoder that its pullback keeps on the device.
    pub checkpoints: usize,
    /// Whether block inputs are stored in host memory.
    pub offload_inputs: bool,
    /// With `offload_inputs`, the number of recorded passes that fit on the device and keep their block inputs there.
    pub passes_on_device: usize,
    /// Whether the results of self-attention are kept until the pullback.
    pub keep_attention: bool,
    /// Tokens of the prompt, padding included.
    pub text_len: usize,
    /// Storage on the device.
    pub storage: DeviceStorage,
}

/// f32 values per token that the recomputation and the pullback of one block hold: 10 per channel of the residual
/// stream plus 4 per channel of the feed-forward layer. Measured: 208 MiB at 4096 tokens, width 512, feed-forward 2048
/// (example `dit_memory` of commit ac7d28a).
pub(super) const BLOCK_WORDS: [usize; 2] = [10, 4];
/// Bytes for CUDA's context, memory that an allocator cannot use, and the networks of rewards.
pub(super) const RESERVE: usize = 2_000_000_000;
/// Number of trained denoising steps that the choice of tiles assumes: the default of `reward_fl`. A model does not
/// know the configured number.
const TRAINED_STEPS: usize = 4;

/// The memory for the VAE on a GPU of `memory` bytes that has `resident` bytes of weights. `block_input_bytes` and
/// `decoder_element_bytes` are those of [`DeviceStorage`].
pub(super) fn vae_budget(
    memory: u64,
    resident: usize,
    dit: &DitConfig,
    [block_input_bytes, decoder_element_bytes]: [usize; 2],
    options: &WanOptions,
) -> MemoryBudget {
    let patch: usize = dit.patch.iter().product();
    // A block input per token, segment of a pass and trained step, and with `keep_attention` a result of attention per
    // block; a token covers `patch` latents.
    let inputs = if options.use_gradient_checkpointing_offload { 0 } else { dit.segments() };
    let attention = if options.keep_attention.without_memory() { dit.layers } else { 0 };
    let recorded_per_latent = (block_input_bytes * dit.dim * (inputs + attention) * TRAINED_STEPS).div_ceil(patch);
    MemoryBudget {
        // A sixteenth is reserved for trained parameters with their gradients and optimizer state, for blocks that a
        // sharded run gathers, and for fragmentation.
        bytes: (memory as usize / 16 * 15).saturating_sub(resident + RESERVE),
        recorded_per_latent,
        element_size: decoder_element_bytes,
        offload: options.use_gradient_checkpointing_offload,
    }
}

/// Bytes of a transformer's weights with `each` bytes per element. With `eight_bits`, the matrices of its blocks have
/// one byte per element and four for the scale of each row.
pub(super) fn weight_bytes(
    shapes: impl IntoIterator<Item = (String, Vec<usize>)>,
    each: usize,
    eight_bits: bool,
) -> usize {
    host_store_bytes(shapes, each, eight_bits).iter().sum()
}

/// Splits the bytes of [`weight_bytes`] as [`HostStore`] does: those always on the device (weights smaller than
/// [`HostStore::SMALL`], and scales), and those in host memory.
fn host_store_bytes(
    shapes: impl IntoIterator<Item = (String, Vec<usize>)>,
    each: usize,
    eight_bits: bool,
) -> [usize; 2] {
    let bytes = |(name, shape): (String, Vec<usize>)| {
        let [scales, values] = match shape.as_slice() {
            [rows, columns] if eight_bits && name.starts_with("blocks.") => [4 * rows, rows * columns],
            shape => [0, each * shape.iter().product::<usize>()],
        };
        if scales + values < HostStore::SMALL { [scales + values, 0] } else { [scales, values] }
    };
    shapes.into_iter().map(bytes).fold([0; 2], |sum, each| [sum[0] + each[0], sum[1] + each[1]])
}

/// Number of elements of tensors of these shapes.
pub(super) fn elements<'a>(weights: impl IntoIterator<Item = &'a (String, Vec<usize>)>) -> usize {
    weights.into_iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
}

impl Plan {
    /// Bytes of the frozen weights of one expert.
    pub(super) fn expert_bytes(&self) -> usize {
        weight_bytes(self.networks.dit.weights(), self.storage.weight_bytes, self.storage.eight_bits)
    }

    /// Bytes of the frozen weights of one block.
    pub(super) fn block_bytes(&self) -> usize {
        weight_bytes(self.networks.block_weights(), self.storage.weight_bytes, self.storage.eight_bits)
    }

    /// Bytes with `model.weight_store: host`: the weights of one expert that are always on the device, its weights in
    /// host memory, and the part of the latter that is one block's.
    fn host_store(&self) -> [usize; 3] {
        let DeviceStorage { weight_bytes, eight_bits, .. } = self.storage;
        let [device, host] = host_store_bytes(self.networks.dit.weights(), weight_bytes, eight_bits);
        let [_, block] = host_store_bytes(self.networks.block_weights(), weight_bytes, eight_bits);
        [device, host, block]
    }

    /// Number of trained elements of all experts.
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
        Ok(one * self.trained_experts.len())
    }

    /// Location of the frozen weights.
    pub fn resolved_placement(&self) -> Placement {
        match (self.placement, self.input.division.stage) {
            (Placement::Auto, 3) => Placement::Sharded,
            (Placement::Auto, _) => Placement::Resident,
            (given, _) => given,
        }
    }

    /// Height and width in pixels; 480 x 832 if each clip has its own size.
    pub(super) fn size(&self) -> [usize; 2] {
        self.input.size.unwrap_or([480, 832])
    }

    /// Shape of the latents without channels: frames, height, width.
    pub(super) fn latent_size(&self) -> [usize; 3] {
        let (vae, [height, width]) = (&self.networks.vae, self.size());
        let space = vae.spatial_stride();
        [self.input.frames.saturating_sub(1) / vae.temporal_stride() + 1, height.div_ceil(space), width.div_ceil(space)]
    }

    /// Number of transformers on the device at a time, if weights are resident.
    pub(super) fn experts_on_device(&self) -> usize {
        match self.storage.idle {
            IdleExpert::Auto | IdleExpert::Keep => self.networks.experts,
            IdleExpert::Host | IdleExpert::Drop => 1,
        }
    }

    /// Number of tokens of a video.
    pub fn tokens(&self) -> usize {
        let [t, h, w] = self.latent_size();
        let [pt, ph, pw] = self.networks.dit.patch;
        t.div_ceil(pt) * h.div_ceil(ph) * w.div_ceil(pw)
    }

    /// Whether the tokens of a video can be sharded among the `count` ranks of a group.
    pub(super) fn can_shard_tokens(&self, count: usize) -> bool {
        let (ranks, heads) = (self.input.ranks(), self.networks.dit.heads);
        // With stage 3, all ranks gather weights together. A rank that waits for its group would block the other
        // groups, so a group has one rank or all.
        let allowed = self.input.division.stage < 3 || count == 1 || count == ranks;
        allowed && [ranks, self.tokens(), heads].iter().all(|n| n.is_multiple_of(count))
    }

    /// Number of tokens that a rank computes.
    pub fn own_tokens(&self) -> usize {
        self.tokens().div_ceil(self.input.division.token_ranks.max(1))
    }
}

impl Networks {
    /// Number of elements of one expert.
    pub fn dit_elements(&self) -> usize {
        elements(&self.dit.weights())
    }

    fn block_weights(&self) -> Vec<(String, Vec<usize>)> {
        self.dit.weights().into_iter().filter(|(name, _)| name.starts_with("blocks.0.")).collect()
    }

    /// Number of elements of one block.
    pub(super) fn block_elements(&self) -> usize {
        elements(&self.block_weights())
    }

    /// Number of elements of the VAE.
    pub fn vae_elements(&self) -> usize {
        elements(&self.vae.weights())
    }
}
