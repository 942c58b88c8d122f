//! Chooses what recorded passes keep on the device, by its memory. `roll plan` and the model decide by the same function.

use super::dit::DitConfig;
use super::options::KeepAttention;
use super::plan::{BLOCK_WORDS, RESERVE};
use super::vae::{DEFAULT_CHECKPOINTS, MemoryBudget, RESTORED_STATES, Tiling, VaeConfig, decoder_bytes};

/// Bytes per trained element: parameter, gradient, sum of gradients, and two moments of the optimizer.
const TRAINED_BYTES: usize = 20;

/// The memory that recorded passes share with everything else on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordedMemory {
    /// Bytes of the device.
    pub memory: u64,
    /// Bytes of resident weights.
    pub resident: usize,
    /// Number of trained elements.
    pub trained: usize,
    /// Number of passes that are recorded at a time, if it is known.
    pub passes: Option<usize>,
    /// Number of ranks that share the tokens of a pass.
    pub token_ranks: usize,
    /// Bytes per element of a block's input.
    pub element: usize,
    /// Bytes per element between two layers of the VAE's decoder.
    pub decoder_element: usize,
    /// The option `model.keep_attention`.
    pub keep_attention: KeepAttention,
    /// Whether block inputs are kept in host memory.
    pub offload: bool,
}

/// What recorded passes keep on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// Whether passes keep the results of self-attention.
    pub attention: bool,
    /// With offloading, how many passes keep their block inputs on the device nevertheless.
    pub passes: usize,
}

impl RecordedMemory {
    /// Decides for a video whose latents are `[T, H, W]`. Results of attention are kept if those of all passes fit,
    /// because recomputing them takes longer than copying block inputs, which overlaps computation.
    pub fn kept(&self, dit: &DitConfig, vae: &VaeConfig, tiling: Option<Tiling>, latents: [usize; 3]) -> Kept {
        let tokens = self.own_tokens(dit, latents);
        let [a, b] = BLOCK_WORDS;
        let block = 4 * tokens * (a * dit.dim + b * dit.ffn_dim);
        let checkpoints = if self.offload { RESTORED_STATES } else { DEFAULT_CHECKPOINTS };
        let pullback = block.max(decoder_bytes(vae, tiling, latents, self.decoder_element, checkpoints));
        let used = [RESERVE, self.resident, self.trained.saturating_mul(TRAINED_BYTES), pullback];
        // One part in 32 is left for memory that nothing here counts, and for fragmentation.
        let free = (self.memory as usize / 32 * 31).saturating_sub(used.into_iter().fold(0, usize::saturating_add));
        let inputs = block_input_bytes(dit, tokens, self.element);
        // In f32: the input in use and the one in flight.
        let in_flight = 2 * 4 * tokens * dit.dim;
        let attention = attention_bytes(dit, tokens, self.element);
        let minimum = |passes: usize| if self.offload { in_flight } else { passes.saturating_mul(inputs) };
        let fits = |passes: usize| minimum(passes).saturating_add(passes.saturating_mul(attention)) <= free;
        let keeps_attention = match self.keep_attention {
            KeepAttention::Of(keeps) => keeps,
            KeepAttention::Auto => self.passes.is_some_and(fits),
        };
        let held = if keeps_attention { self.passes.unwrap_or(1).saturating_mul(attention) } else { 0 };
        let room = free.saturating_sub(held);
        let all = self.passes.filter(|passes| passes.saturating_mul(inputs) <= room);
        let passes = all.unwrap_or(room.saturating_sub(in_flight) / inputs.max(1));
        Kept { attention: keeps_attention, passes: if self.offload { passes } else { 0 } }
    }

    /// The part of `budget` that `kept` leaves to the decoder, where the option leaves the choice open. Otherwise
    /// `budget` has the results of attention in it already.
    pub fn beside(&self, budget: MemoryBudget, kept: Kept, dit: &DitConfig) -> MemoryBudget {
        if self.keep_attention != KeepAttention::Auto || !kept.attention {
            return budget;
        }
        let patch: usize = dit.patch.iter().product();
        let attention = self.passes.unwrap_or(1) * attention_bytes(dit, 1, self.element);
        MemoryBudget { recorded_per_latent: budget.recorded_per_latent + attention.div_ceil(patch), ..budget }
    }

    fn own_tokens(&self, dit: &DitConfig, latents: [usize; 3]) -> usize {
        let tokens: usize = latents.iter().zip(dit.patch).map(|(size, patch)| size.div_ceil(patch)).product();
        tokens.div_ceil(self.token_ranks.max(1))
    }
}

/// Bytes of the block inputs of a pass: one for each checkpointing segment.
pub(super) fn block_input_bytes(dit: &DitConfig, tokens: usize, element: usize) -> usize {
    element * tokens * dit.dim * dit.segments()
}

/// Bytes of the results of self-attention of a pass, with a number in f32 for each token and head.
pub(super) fn attention_bytes(dit: &DitConfig, tokens: usize, element: usize) -> usize {
    dit.layers * tokens * (element * dit.dim + 4 * dit.heads)
}
