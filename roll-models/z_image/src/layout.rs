//! Decides from options, networks and machine where the parts of a model lie, and what its recorded passes keep. The
//! loader executes the decision, a [`Layout`], and `roll plan` counts its bytes.

use burn_tensor::DType;
use roll_backends::weights::{MatrixStorage, Storage};
use roll_backends::{EightBits, Memory};
use roll_core::{Error, Result};
pub use roll_network::machine::Machine;
use roll_network::options::{KeepAttention, Placement};
use roll_network::trainable::kept_for_pullback;

use crate::dit::{DitConfig, F32_PREFIXES};
use crate::options::ZImageOptions;
use crate::transformer_file::{TransformerFile, is_block_matrix};
use crate::vae::{DECODER_WORDS, VaeConfig};

/// Bytes of an f32 number.
pub const F32_SIZE: usize = size_of::<f32>();
/// f32 values per token that the recomputation and the pullback of one block hold: per channel of the residual stream,
/// and of the feed-forward layer. Those of Wan's blocks, with one product more in the feed-forward layer.
pub const BLOCK_WORDS: [usize; 2] = [10, 6];
/// Bytes for CUDA's context, memory that an allocator cannot use, and the networks of rewards.
pub const RESERVE: usize = 2_000_000_000;
/// Bytes per trained element: parameter, gradient, sum of gradients, and two moments of the optimizer.
const TRAINED_BYTES: usize = 20;

/// The networks of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Networks {
    /// Sizes of the transformer.
    pub dit: DitConfig,
    /// Dtype of dense weights in the transformer's file.
    pub stored_dtype: DType,
    /// The format of the matrices of the blocks, if the file has them in eight bits.
    pub eight_bits: Option<EightBits>,
    /// Sizes of the VAE, which is resident in f32.
    pub vae: VaeConfig,
}

impl Networks {
    /// Reads the sizes in the files of a model.
    pub fn of(dit: &TransformerFile, vae: VaeConfig) -> Result<Self> {
        let (stored_dtype, eight_bits) = (dit.stored_dtype(), dit.eight_bits());
        Ok(Self { dit: dit.config()?, stored_dtype, eight_bits, vae })
    }
}

/// Where the parts of a model lie.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Location of the transformer's frozen weights; not `Auto`.
    pub placement: Placement,
    /// Storage of the transformer's frozen weights.
    pub storage: Storage,
    /// The format of the matrices of the blocks, if they are in eight bits.
    pub eight_bits: Option<EightBits>,
    /// Dtype of matrix products and of block inputs.
    pub products: DType,
    /// Dtype of values between two layers of the VAE's decoder.
    pub decoder_dtype: DType,
    /// What recorded passes keep.
    pub memory: Memory,
    /// The networks.
    pub networks: Networks,
    /// The machine.
    pub machine: Machine,
    keep_attention: KeepAttention,
}

impl Layout {
    /// Decides where the parts of `networks` lie.
    ///
    /// # Errors
    /// Fails on options that contradict each other, and on a dtype that the device lacks.
    pub fn of(options: &ZImageOptions, networks: Networks, machine: Machine) -> Result<Self> {
        let device = machine.device;
        let placement = match options.weight_store.or(machine.placement) {
            Placement::Auto => Placement::Resident,
            given => given,
        };
        let storage = options.weights_dtype.storage(networks.stored_dtype, &F32_PREFIXES, device)?;
        let eight_bits = match (storage.matrices, placement) {
            (MatrixStorage::Eight(_), Placement::Sharded | Placement::Streamed) => {
                let problem = "weights are rounded to eight bits when they are loaded, neither sharded nor streamed: \
                               expected auto, f32 or bf16, or `model.weight_store: host`";
                return Err(Error::config("model.weights_dtype", problem));
            }
            (MatrixStorage::Eight(format), _) => Some(format),
            (MatrixStorage::AsInFile, Placement::Sharded) | (MatrixStorage::Dense, _) => None,
            (MatrixStorage::AsInFile, _) => networks.eight_bits,
        };
        options.products.check_weights(eight_bits)?;
        Ok(Self {
            placement,
            storage,
            eight_bits,
            products: options.compute_dtype.of(storage.dtype, device)?,
            decoder_dtype: options.vae_dtype.of(device)?,
            memory: kept_for_pullback(options.use_gradient_checkpointing, options.use_gradient_checkpointing_offload),
            networks,
            machine,
            keep_attention: options.effective_keep_attention(),
        })
    }

    /// Bytes of the transformer's frozen weights.
    pub fn weight_bytes(&self) -> usize {
        self.bytes_of(|_| true)
    }

    /// Bytes of the frozen weights of the largest segment, a block.
    pub fn block_bytes(&self) -> usize {
        self.bytes_of(|name| name.starts_with("layers.0."))
    }

    /// Bytes of the weights whose names `wanted` accepts. Eight bits have a scale in f32 per row.
    fn bytes_of(&self, wanted: impl Fn(&str) -> bool) -> usize {
        let weights = self.networks.dit.weights().into_iter().filter(|(name, _)| wanted(name));
        let bytes = weights.map(|(name, shape)| match (self.eight_bits, shape.iter().product::<usize>()) {
            (Some(_), count) if is_block_matrix(&name, &shape) => count + F32_SIZE * shape[0],
            (_, count) => self.storage.dtype.size() * count,
        });
        bytes.sum()
    }

    /// Bytes of the VAE's weights.
    pub fn vae_bytes(&self) -> usize {
        let elements = |(_, shape): &(String, Vec<usize>)| shape.iter().product::<usize>();
        F32_SIZE * self.networks.vae.weights().iter().map(elements).sum::<usize>()
    }

    /// Bytes of the inputs of the segments of a pass over `tokens`.
    pub fn block_input_bytes(&self, tokens: usize) -> usize {
        self.products.size() * tokens * self.networks.dit.dim * self.networks.dit.segments()
    }

    /// Bytes of the results of attention of a pass, with a number in f32 for each token and head.
    pub fn attention_bytes(&self, tokens: usize) -> usize {
        let dit = &self.networks.dit;
        (dit.noise_refiners + dit.layers) * tokens * (self.products.size() * dit.dim + F32_SIZE * dit.heads)
    }

    /// Bytes that the recomputation and the pullback of one transformer block hold.
    pub fn block_pullback_bytes(&self, tokens: usize) -> usize {
        let ([residual, feed_forward], dit) = (BLOCK_WORDS, &self.networks.dit);
        F32_SIZE * tokens * (residual * dit.dim + feed_forward * dit.ffn_dim)
    }

    /// Bytes that the decoder and its pullback hold besides weights, for latents of `[height, width]`.
    pub fn decoder_bytes(&self, latents: [usize; 2]) -> usize {
        self.networks.vae.decoder_bytes(latents, self.decoder_dtype.size(), self.decoder_words())
    }

    /// Values in f32 that the pullback of a decoder block holds, per value of the block's input.
    pub fn decoder_words(&self) -> usize {
        DECODER_WORDS[usize::from(self.machine.device.is_gpu)]
    }

    /// Whether recorded passes over `tokens`, of pictures with latents of `[height, width]`, keep the results of
    /// attention, beside `trained` parameters: with `auto`, if those of all passes are known to fit.
    pub fn keeps_attention(&self, trained: usize, tokens: usize, latents: [usize; 2]) -> bool {
        let (KeepAttention::Auto, Some(memory), Some(passes)) =
            (self.keep_attention, self.machine.memory, self.machine.recorded_passes)
        else {
            return self.keep_attention.is_always();
        };
        let weights = match self.placement {
            Placement::Resident | Placement::Auto => self.weight_bytes(),
            Placement::Streamed | Placement::Host | Placement::Sharded => 2 * self.block_bytes(),
        };
        let inputs = if self.memory == Memory::Offload { 0 } else { self.block_input_bytes(tokens) };
        let pullback = self.block_pullback_bytes(tokens).max(self.decoder_bytes(latents));
        let fixed = [RESERVE, weights, self.vae_bytes(), trained.saturating_mul(TRAINED_BYTES), pullback];
        let of_passes = passes.saturating_mul(inputs + self.attention_bytes(tokens));
        let needed = fixed.into_iter().fold(of_passes, usize::saturating_add);
        // One part in 32 is left for memory that nothing here counts, and for fragmentation.
        needed <= memory as usize / 32 * 31
    }
}
