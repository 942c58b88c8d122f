//! Decides from options, networks and machine where the parts of a model lie, and what its recorded passes keep on the
//! device. The loader executes the decision, a [`Layout`], and `roll plan` counts its bytes.

use burn_tensor::DType;
use roll_backends::EightBits;
use roll_backends::weights::{MatrixStorage, Storage};
use roll_core::{Error, Result};
pub use roll_network::machine::Machine;

use super::dit::{DitConfig, F32_PREFIXES};
use super::networks::{Networks, WeightBytes};
use super::options::{Checkpoints, IdleExpert, KeepAttention, Placement, TileSize, WanOptions};
use super::vae::{DEFAULT_CHECKPOINTS, MemoryBudget, RESTORED_STATES, Tiling, decoder_bytes};

/// Bytes of an f32 number.
pub(super) const F32_SIZE: usize = size_of::<f32>();
/// f32 values per token that the recomputation and the pullback of one block hold: 10 per channel of the residual
/// stream plus 4 per channel of the feed-forward layer. Measured: 208 MiB at 4096 tokens, width 512, feed-forward 2048
/// (example `dit_memory` of commit ac7d28a).
pub(super) const BLOCK_WORDS: [usize; 2] = [10, 4];
/// Bytes for CUDA's context, memory that an allocator cannot use, and the networks of rewards.
pub(super) const RESERVE: usize = 2_000_000_000;
/// Number of trained denoising steps that the choice of tiles assumes: the default of `reward_fl`. Encodings depend on
/// the tiles, and must not depend on the algorithm.
const TRAINED_STEPS: usize = 4;
/// Bytes per trained element: parameter, gradient, sum of gradients, and two moments of the optimizer.
const TRAINED_BYTES: usize = 20;

/// Where the parts of a model lie.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Location of the transformers' frozen weights; not `Auto`.
    pub placement: Placement,
    /// Location of the frozen weights of the expert that is not in use, if weights are resident; not `Auto`.
    pub idle: IdleExpert,
    /// Storage of the transformers' frozen weights.
    pub storage: Storage,
    /// The format of the matrices of the blocks, if they are in eight bits.
    pub eight_bits: Option<EightBits>,
    /// Dtype of matrix products and of block inputs.
    pub products: DType,
    /// Dtype of values between two layers of the VAE's decoder.
    pub decoder_dtype: DType,
    /// Whether block inputs are stored in host memory.
    pub offload_inputs: bool,
    /// The networks.
    pub networks: Networks,
    /// The machine.
    pub machine: Machine,
    /// Tiles of the VAE; `None` if they are chosen for each video, by the memory.
    pub(super) tiles: Option<Tiles>,
    /// The number of the decoder's checkpoints.
    pub(super) checkpoints: Checkpoints,
    /// Whether recorded passes keep results of attention.
    pub(super) keep_attention: KeepAttention,
}

/// Tiles that are the same for all videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tiles {
    Whole,
    Of(Tiling),
}

/// The tiles of a video of one size, and what the model keeps on the device for its pullback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoLayout {
    /// Tiles of the VAE; `None` processes whole frames.
    pub tiling: Option<Tiling>,
    /// Whether recorded passes keep the results of self-attention until the pullback.
    pub keep_attention: bool,
    /// With [`Layout::offload_inputs`], the number of recorded passes that fit on the device and keep their block inputs
    /// there.
    pub passes_on_device: usize,
    /// Checkpoints of the decoder that its pullback keeps.
    pub checkpoints: CheckpointCount,
}

/// A number of checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointCount {
    /// This number.
    Of(usize),
    /// At least 4, and as many as fit into the host memory that is free in the run.
    InHostMemory,
}

impl CheckpointCount {
    /// The number that is certain.
    pub fn least(self) -> usize {
        match self {
            Self::Of(count) => count,
            Self::InHostMemory => DEFAULT_CHECKPOINTS,
        }
    }
}

impl Layout {
    /// Decides where the parts of `networks` lie. Fails on options that contradict each other, or that the device lacks
    /// a dtype for.
    pub fn of(options: &WanOptions, networks: Networks, machine: Machine) -> Result<Self> {
        let device = machine.device;
        let placement = match options.weight_store.or(machine.placement) {
            Placement::Auto => Placement::Resident,
            given => given,
        };
        let storage = options.weights_dtype.storage(networks.stored_dtype, &F32_PREFIXES, device)?;
        let eight_bits = eight_bits_on_device(storage.matrices, placement, &networks)?;
        options.products.check_weights(eight_bits)?;
        let tiles = match (options.vae_tile_size, options.tiling()?) {
            (TileSize::Auto, _) => None,
            (_, None) => Some(Tiles::Whole),
            (_, Some(tiling)) => Some(Tiles::Of(tiling)),
        };
        let mut layout = Self {
            placement,
            idle: IdleExpert::Keep,
            storage,
            eight_bits,
            products: options.compute_dtype.of(storage.dtype, device)?,
            decoder_dtype: options.vae_dtype.of(device)?,
            offload_inputs: options.use_gradient_checkpointing_offload,
            networks,
            machine,
            tiles,
            checkpoints: options.vae_checkpoints,
            keep_attention: options.effective_keep_attention(),
        };
        if placement == Placement::Resident && layout.networks.experts > 1 {
            let bytes = layout.networks.experts * layout.expert_bytes();
            let is_converted = layout.networks.stored_dtype != storage.dtype
                || options.base_lora.is_some()
                || matches!(storage.matrices, MatrixStorage::Eight(_));
            layout.idle = options.idle_expert.chosen(bytes, device.is_gpu, machine.memory, is_converted);
        }
        Ok(layout)
    }

    /// Bytes of the frozen weights of one expert.
    pub fn expert_bytes(&self) -> usize {
        self.bytes_of(&self.networks.dit.weights()).all()
    }

    /// Bytes of weights of a transformer, as they are stored.
    pub(super) fn bytes_of(&self, weights: &[(String, Vec<usize>)]) -> WeightBytes {
        WeightBytes::of(weights, self.storage.dtype.size(), self.eight_bits.is_some())
    }

    /// Number of transformers on the device at a time, if weights are resident.
    pub fn experts_on_device(&self) -> usize {
        match self.idle {
            IdleExpert::Auto | IdleExpert::Keep => self.networks.experts,
            IdleExpert::Host | IdleExpert::Drop => 1,
        }
    }

    /// Bytes of weights that are on the device all the time: those of resident experts, and those of the VAE in f32.
    fn resident_bytes(&self) -> usize {
        let experts = if self.placement == Placement::Resident { self.experts_on_device() } else { 0 };
        experts * self.expert_bytes() + F32_SIZE * self.networks.vae_elements()
    }

    /// Whether states of the decoder (its feature caches) are offloaded to host memory. The CPU has no other memory to
    /// offload from.
    pub(super) fn offloads_states(&self) -> bool {
        self.offload_inputs && self.machine.device.is_gpu
    }

    /// The memory for the VAE, of the `memory` bytes of the device.
    fn vae_budget(&self, memory: u64) -> MemoryBudget {
        let dit = &self.networks.dit;
        let patch: usize = dit.patch.iter().product();
        // Per token and trained step: a block input for each segment of a pass and, if the options select them, a
        // result of attention for each block. A token covers `patch` latents.
        let inputs = if self.offload_inputs { 0 } else { dit.segments() };
        let attention = if self.keep_attention.is_always() { dit.layers } else { 0 };
        let recorded = self.products.size() * dit.dim * (inputs + attention) * TRAINED_STEPS;
        MemoryBudget {
            // A sixteenth is reserved for trained parameters with their gradients and optimizer state, for blocks that a
            // sharded run gathers, and for fragmentation.
            bytes: (memory as usize / 16 * 15).saturating_sub(self.resident_bytes() + RESERVE),
            recorded_per_latent: recorded.div_ceil(patch),
            element_size: self.decoder_dtype.size(),
            offload: self.offloads_states(),
        }
    }

    /// The tiles of all videos. If tiles are chosen for each video instead, also the memory by which they are chosen.
    pub(super) fn tile_choice(&self) -> (Option<Tiling>, Option<MemoryBudget>) {
        match self.tiles {
            None => (None, self.machine.memory.map(|memory| self.vae_budget(memory))),
            Some(Tiles::Whole) => (None, None),
            Some(Tiles::Of(tiling)) => (Some(tiling), None),
        }
    }

    /// Decides what a video whose latents are `[T, H, W]` keeps on the device, beside `trained` parameters.
    pub fn video(&self, trained: usize, latents: [usize; 3]) -> VideoLayout {
        let (vae, (mut tiling, tile_budget)) = (&self.networks.vae, self.tile_choice());
        if let Some(budget) = tile_budget {
            tiling = budget.tiling(vae, latents);
        }
        let (keep_attention, passes_on_device) = match self.machine.memory {
            Some(memory) => self.kept_by_passes(self.free_for_passes(memory, trained, tiling, latents), latents),
            None => (self.keep_attention.is_always(), 0),
        };
        let [chunks, ..] = latents;
        let checkpoints = match (self.checkpoints, self.machine.memory) {
            (Checkpoints::Of(count), _) => CheckpointCount::Of(count.min(chunks.saturating_sub(1))),
            (Checkpoints::Auto, _) if self.offloads_states() => CheckpointCount::InHostMemory,
            (Checkpoints::Auto, Some(memory)) => {
                let budget = self.beside_attention(self.vae_budget(memory), keep_attention);
                CheckpointCount::Of(budget.checkpoints(vae, tiling, latents))
            }
            (Checkpoints::Auto, None) => CheckpointCount::Of(DEFAULT_CHECKPOINTS),
        };
        VideoLayout { tiling, keep_attention, passes_on_device, checkpoints }
    }

    /// Bytes of the device's `memory` that are left for the block inputs and results of attention of recorded passes.
    fn free_for_passes(&self, memory: u64, trained: usize, tiling: Option<Tiling>, latents: [usize; 3]) -> usize {
        let checkpoints = if self.offloads_states() { RESTORED_STATES } else { DEFAULT_CHECKPOINTS };
        let decoder = decoder_bytes(&self.networks.vae, tiling, latents, self.decoder_dtype.size(), checkpoints);
        let pullback = block_pullback_bytes(&self.networks.dit, self.own_tokens(latents)).max(decoder);
        let used = [RESERVE, self.resident_bytes(), trained.saturating_mul(TRAINED_BYTES), pullback];
        // One part in 32 is left for memory that nothing here counts, and for fragmentation.
        (memory as usize / 32 * 31).saturating_sub(used.into_iter().fold(0, usize::saturating_add))
    }

    /// Whether recorded passes keep results of attention in `free` bytes, and the number of passes that keep their
    /// block inputs on the device although the inputs of other passes are offloaded. Results of attention are kept if
    /// those of all passes fit, because recomputing them takes longer than copying block inputs, which overlaps
    /// computation.
    fn kept_by_passes(&self, free: usize, latents: [usize; 3]) -> (bool, usize) {
        let (dit, passes, element_size) = (&self.networks.dit, self.machine.recorded_passes, self.products.size());
        let tokens = self.own_tokens(latents);
        let inputs = block_input_bytes(dit, tokens, element_size);
        // In f32: the input in use and the one in flight.
        let in_flight = 2 * F32_SIZE * tokens * dit.dim;
        let attention = attention_bytes(dit, tokens, element_size);
        let offloads = self.offloads_states();
        let least_inputs = |passes: usize| if offloads { in_flight } else { passes.saturating_mul(inputs) };
        let fits = |passes: usize| least_inputs(passes).saturating_add(passes.saturating_mul(attention)) <= free;
        let keep_attention = match self.keep_attention {
            KeepAttention::Of(keeps) => keeps,
            KeepAttention::Auto => passes.is_some_and(fits),
        };
        if !offloads {
            return (keep_attention, 0);
        }
        let kept_attention = if keep_attention { passes.unwrap_or(1).saturating_mul(attention) } else { 0 };
        let free_for_inputs = free.saturating_sub(kept_attention);
        let all_passes = passes.filter(|passes| passes.saturating_mul(inputs) <= free_for_inputs);
        (keep_attention, all_passes.unwrap_or(free_for_inputs.saturating_sub(in_flight) / inputs.max(1)))
    }

    /// The part of `budget` that kept results of attention leave to the decoder. If `model.keep_attention` decides
    /// whether they are kept, and not the memory, `budget` already includes them.
    fn beside_attention(&self, budget: MemoryBudget, keep_attention: bool) -> MemoryBudget {
        if self.keep_attention != KeepAttention::Auto || !keep_attention {
            return budget;
        }
        let dit = &self.networks.dit;
        let patch: usize = dit.patch.iter().product();
        let passes = self.machine.recorded_passes.unwrap_or(1);
        let attention = passes * attention_bytes(dit, 1, self.products.size());
        MemoryBudget { recorded_per_latent: budget.recorded_per_latent + attention.div_ceil(patch), ..budget }
    }

    /// Number of tokens of a video that a rank computes.
    fn own_tokens(&self, latents: [usize; 3]) -> usize {
        let sizes = latents.iter().zip(self.networks.dit.patch).map(|(size, patch)| size.div_ceil(patch));
        sizes.product::<usize>().div_ceil(self.machine.token_ranks.max(1))
    }
}

/// The format of the blocks' matrices on the device, if it has eight bits. Fails if such matrices would be sharded.
fn eight_bits_on_device(
    matrices: MatrixStorage,
    placement: Placement,
    networks: &Networks,
) -> Result<Option<EightBits>> {
    match (matrices, placement) {
        (MatrixStorage::Eight(_), Placement::Sharded) => {
            let problem = "weights in eight bits are not sharded: expected auto, f32 or bf16 with `sharded`, or \
                           another `model.weight_store`: `host` keeps them in host memory";
            Err(Error::config("model.weights_dtype", problem))
        }
        (MatrixStorage::Eight(format), _) => Ok(Some(format)),
        // Sharding decodes matrices in eight bits.
        (MatrixStorage::AsInFile, Placement::Sharded) | (MatrixStorage::Dense, _) => Ok(None),
        (MatrixStorage::AsInFile, _) => Ok(networks.eight_bits),
    }
}

/// Bytes that the recomputation and the pullback of one transformer block hold.
pub(super) fn block_pullback_bytes(dit: &DitConfig, tokens: usize) -> usize {
    let [residual, feed_forward] = BLOCK_WORDS;
    F32_SIZE * tokens * (residual * dit.dim + feed_forward * dit.ffn_dim)
}

/// Bytes of the block inputs of a pass: one for each checkpointing segment.
pub(super) fn block_input_bytes(dit: &DitConfig, tokens: usize, element_size: usize) -> usize {
    element_size * tokens * dit.dim * dit.segments()
}

/// Bytes of the results of self-attention of a pass, with a number in f32 for each token and head.
pub(super) fn attention_bytes(dit: &DitConfig, tokens: usize, element_size: usize) -> usize {
    dit.layers * tokens * (element_size * dit.dim + F32_SIZE * dit.heads)
}
