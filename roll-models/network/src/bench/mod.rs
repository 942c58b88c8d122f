//! Published models that `roll bench` measures with random weights.
//!
//! A model that shall be measured submits a [`BenchPreset`]; [`random`] draws its weights.

pub mod random;

use burn_tensor::{DType, Device};
use roll_backends::{EightBits, Memory};
use roll_core::plan::{Division, Passes, PhaseCost, PlanInput, Speed};
use roll_core::{Error, Model, Result};

use crate::options::Placement;
use crate::precision::WeightsDType;

/// Rank of the LoRA of a measured model.
pub const LORA_RANK: usize = 32;

/// What is measured of a preset: the arguments of `roll bench`. `None` is the preset's own value.
#[derive(Clone, Debug)]
pub struct BenchRequest {
    /// Number of transformer blocks.
    pub layers: Option<usize>,
    /// Number of frames.
    pub frames: Option<usize>,
    /// Height and width in pixels.
    pub size: Option<[usize; 2]>,
    /// Dtype of stored weights and of products.
    pub dtype: Option<DType>,
    /// Format of the matrices of the blocks, if they are in eight bits.
    pub eight_bits: Option<EightBits>,
    /// Whether products with fp8 weights are in fp8.
    pub fp8_products: bool,
    /// Location of the transformer's weights.
    pub weight_store: Placement,
    /// Whether inputs of blocks wait in host memory.
    pub offload: bool,
    /// Whether results of attention are kept.
    pub keep_attention: bool,
    /// Caches that the pullback of a video decoder keeps between chunks.
    pub vae_checkpoints: Option<usize>,
    /// The passes of a step.
    pub passes: Passes,
}

impl BenchRequest {
    /// The number of blocks of a network that has `all` of them.
    ///
    /// # Errors
    /// Fails unless it is one of 1 to `all`.
    pub fn layers_of(&self, all: usize) -> Result<usize> {
        match self.layers.unwrap_or(all) {
            layers if (1..=all).contains(&layers) => Ok(layers),
            layers => Err(Error::config("--layers", format!("expected 1 to {all}, found {layers}"))),
        }
    }

    /// What recorded passes keep.
    pub fn memory(&self) -> Memory {
        if self.offload { Memory::Offload } else { Memory::Recompute }
    }

    /// The option `weights_dtype` for the eight bits.
    pub fn weights_dtype(&self) -> WeightsDType {
        match self.eight_bits {
            None => WeightsDType::Auto,
            Some(EightBits::Int8) => WeightsDType::Int8,
            Some(EightBits::E4m3 | EightBits::E5m2) => WeightsDType::Fp8,
        }
    }

    /// The step as the input of a plan, by which operations are counted.
    pub fn plan_input(&self, frames: usize, size: [usize; 2]) -> PlanInput {
        PlanInput {
            network: None,
            frames,
            size: Some(size),
            memory: None,
            samples: 1,
            ranks: 1,
            passes: self.passes.clone(),
            division: Division::default(),
            // Any speed does, because only operations are read from the plan.
            speed: Speed { flops: 1.0, link: 1.0, read: 1.0 },
        }
    }
}

/// Sizes of the networks and of the step that are measured.
#[derive(Clone, Debug)]
pub struct BenchFacts {
    /// Width of the residual stream.
    pub dim: usize,
    /// Width of the feed-forward layer.
    pub ffn_dim: usize,
    /// Measured blocks.
    pub layers: usize,
    /// Blocks of the whole network.
    pub all_layers: usize,
    /// Weights of the measured transformer.
    pub parameters: usize,
    /// Dtype of stored weights and of products.
    pub dtype: DType,
    /// Number of frames.
    pub frames: usize,
    /// Height and width in pixels.
    pub size: [usize; 2],
    /// Tokens of a pass.
    pub tokens: usize,
    /// Shape of the latents, `[C, T, H, W]`.
    pub latent_shape: [usize; 4],
    /// Shape of the text features, `[tokens, width]`.
    pub context: [usize; 2],
    /// Channels that the transformer takes besides those of the latents.
    pub more_channels: usize,
    /// The planned operations of a step by phase, of all its passes.
    pub time: Vec<PhaseCost>,
}

/// Networks that can be measured.
pub trait BenchNetworks {
    /// The sizes.
    fn facts(&self) -> &BenchFacts;

    /// Makes the model on `device`, with random weights and a LoRA of [`LORA_RANK`]. `vae` is the dtype of the VAE's
    /// decoder.
    ///
    /// # Errors
    /// Fails if the device lacks a dtype.
    fn model(&self, device: &Device, vae: DType) -> Result<Box<dyn Model>>;
}

/// Networks that `roll bench` knows by name.
#[derive(Debug)]
pub struct BenchPreset {
    /// The value of `--preset`.
    pub name: &'static str,
    /// The value of `model.name` for these networks.
    pub model: &'static str,
    /// Name of the published networks in `roll plan`, if they are published.
    pub network: Option<&'static str>,
    /// Makes the networks that are measured.
    pub make: fn(&BenchRequest) -> Result<Box<dyn BenchNetworks>>,
}

roll_core::inventory::collect!(BenchPreset);

/// All presets, sorted by name.
pub fn presets() -> Vec<&'static BenchPreset> {
    let mut all: Vec<_> = roll_core::inventory::iter::<BenchPreset>.into_iter().collect();
    all.sort_by_key(|preset| preset.name);
    all
}
