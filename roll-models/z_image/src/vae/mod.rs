//! The autoencoder of Z-Image: diffusers' `AutoencoderKL` in the form of FLUX, without (post_)quant_conv.
//!
//! Pictures are videos of one frame, f32 `[1, 3, H, W]` in -1..1; latents are f32 `[C, 1, h, w]`, shifted and scaled:
//! `(mean - shift) * scale`. A recorded pass keeps the input of each block; the pullback computes one block at a time
//! again, last block first. The result is exact. Tiles would not be: norms and attention span the whole picture.

mod block;
mod config;
mod group_norm;
mod names;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use burn_tensor::{DType, Device, Tensor as Burn};
use roll_backends::{Resident, WeightStore, to_device, to_host};
use roll_core::{Error, Grad, Pullback, Result, StateDict, Tensor};
use roll_network::precision::as_dtype;

pub use config::{DECODER_WORDS, DecoderInput, VaeConfig};

use block::Block;

/// The autoencoder. Clones share the weights.
#[derive(Clone)]
pub struct Vae {
    config: VaeConfig,
    encoder: Arc<Network>,
    decoder: Arc<Network>,
}

/// The encoder or the decoder.
struct Network {
    blocks: Vec<Block>,
    store: Arc<dyn WeightStore>,
    /// Dtype of the blocks, except of those that stay f32 ([`Block::dtype`]).
    dtype: DType,
}

/// The input of a block, kept for its pullback.
struct BlockInput {
    shape: [usize; 4],
    /// `None` if the pullback does not read it.
    value: Option<Burn<4>>,
}

/// Receives the output of each block: the block's name and a `[C, 1, H, W]` tensor.
pub type Probe<'a> = &'a mut dyn FnMut(&str, &Tensor);

impl Vae {
    /// Creates an autoencoder from weights by diffusers' or FLUX's original names, kept as f32. Fails if a weight is
    /// missing, has another shape or does not belong to the network.
    pub fn new(config: VaeConfig, state: &StateDict, device: &Device) -> Result<Self> {
        let state = names::to_diffusers(&config, state)?;
        config.check_weights(&state.iter().map(|(name, tensor)| (name.as_str(), tensor.shape())).collect())?;
        let weights = config.weights();
        let own: StateDict =
            weights.into_iter().filter_map(|(name, _)| state.get(&name).map(|t| (name, t.clone()))).collect();
        Ok(Self::with_store(config, Arc::new(Resident::new(&own, DType::F32, device))))
    }

    /// Creates an autoencoder whose weights lie in `store`, in f32 by diffusers' names.
    pub fn with_store(config: VaeConfig, store: Arc<dyn WeightStore>) -> Self {
        let network = |blocks| Arc::new(Network { blocks, store: store.clone(), dtype: DType::F32 });
        let (encoder, decoder) = (network(config.encoder_blocks()), network(config.decoder_blocks()));
        Self { config, encoder, decoder }
    }

    /// Sets the dtype of the decoder: f32 or bf16. In bf16, weights and activations are rounded and sums are f32;
    /// latents, norms, attention, the last layer and the encoder stay f32. Fails on other dtypes, and on bf16 if the
    /// device has none.
    pub fn with_decoder_dtype(self, dtype: DType) -> Result<Self> {
        let Network { blocks, store, .. } = &*self.decoder;
        if !matches!(dtype, DType::F32 | DType::BF16) || !store.device().supports_dtype(dtype) {
            let problem = format!("the device cannot decode in {dtype:?}: expected f32, or bf16 where a device has it");
            return Err(Error::Unsupported(problem));
        }
        let decoder = Arc::new(Network { blocks: blocks.clone(), store: store.clone(), dtype });
        Ok(Self { decoder, ..self })
    }

    /// Sizes and scaling.
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// Encodes a picture `[1, 3, H, W]` as latents `[C, 1, h, w]`: the mean, shifted and scaled. Sizes that are no
    /// multiples of the stride lose their last rows and columns. The pullback returns the cotangent of the picture.
    pub fn encode(&self, picture: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let stride = self.config.spatial_stride();
        let shape = match *picture.shape() {
            [1, 3, h, w] if h >= stride && w >= stride => [3, 1, h, w],
            _ => {
                let expected = format!("[1, 3, H, W], sides of {stride} pixels or more");
                return Err(Error::shape("picture to encode", expected, picture.shape()));
            }
        };
        picture.f32s()?;
        // One frame: `[1, 3, H, W]` and `[3, 1, H, W]` have the same order of values.
        let x = to_device::<4>(&picture.reshape(shape)?, self.encoder.store.device())?;
        let (moments, inputs) = self.encoder.run(x, grad, None)?;
        let (c, scale, shift) = (self.config.latent_channels, self.config.scaling_factor, self.config.shift_factor);
        let latents = (moments.narrow(0, 0, c) - shift) * scale;
        let (dims, network) = (latents.dims(), self.encoder.clone());
        let pullback = inputs.map(|inputs| {
            Pullback::new(move |cotangent: &Tensor| {
                let d_mean = network.cotangent(cotangent, dims, dims)? * scale;
                let no_variance = d_mean.zeros_like();
                let d_x = network.pull(inputs, Burn::cat(vec![d_mean, no_variance], 0))?;
                let [c, t, h, w] = d_x.dims();
                to_host(d_x)?.reshape([t, c, h, w])
            })
        });
        Ok((to_host(latents)?, pullback))
    }

    /// Decodes latents `[C, 1, h, w]` to a picture `[1, 3, H, W]`, not clamped. The pullback returns the cotangent of
    /// the latents.
    pub fn decode(&self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        self.decode_with(latents, Clamp::Off, grad, None)
    }

    /// Decodes like [`Vae::decode`], clamped to [-1, 1]. Values that the clamp changed receive no gradient.
    pub fn decode_clamped(&self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        self.decode_with(latents, Clamp::On, grad, None)
    }

    /// Decodes like [`Vae::decode`], without gradient. `probe` receives every block's output.
    pub fn decode_probed(&self, latents: &Tensor, probe: Probe<'_>) -> Result<Tensor> {
        Ok(self.decode_with(latents, Clamp::Off, Grad::Skip, Some(probe))?.0)
    }

    fn decode_with(
        &self,
        latents: &Tensor,
        clamp: Clamp,
        grad: Grad,
        probe: Option<Probe<'_>>,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let channels = self.config.latent_channels;
        if !matches!(*latents.shape(), [c, 1, h, w] if c == channels && h > 0 && w > 0) {
            return Err(Error::shape("latents to decode", format!("[{channels}, 1, h, w]"), latents.shape()));
        }
        latents.f32s()?;
        let (scale, shift) = (self.config.scaling_factor, self.config.shift_factor);
        let x = to_device::<4>(latents, self.decoder.store.device())? / scale + shift;
        let (picture, inputs) = self.decoder.run(x, grad, probe)?;
        let dims @ [c, t, h, w] = picture.dims();
        let clamped = match clamp {
            Clamp::Off => picture.clone(),
            Clamp::On => picture.clone().clamp(-1.0, 1.0),
        };
        let network = self.decoder.clone();
        let pullback = inputs.map(|inputs| {
            Pullback::new(move |cotangent: &Tensor| {
                let mut d_picture = network.cotangent(cotangent, [t, c, h, w], dims)?;
                if let Clamp::On = clamp {
                    d_picture = d_picture.mask_fill(picture.abs().greater_elem(1.0), 0.0);
                }
                to_host(network.pull(inputs, d_picture)? / scale)
            })
        });
        Ok((to_host(clamped)?.reshape([t, c, h, w])?, pullback))
    }
}

/// Whether pixels are clamped to [-1, 1].
#[derive(Clone, Copy)]
enum Clamp {
    On,
    Off,
}

impl Network {
    /// Runs the blocks on x `[C, 1, H, W]`. Returns the output in f32 and, if `grad` is on, the input of each block.
    fn run(&self, x: Burn<4>, grad: Grad, mut probe: Option<Probe<'_>>) -> Result<(Burn<4>, Option<Vec<BlockInput>>)> {
        let mut x = x;
        let mut inputs = grad.is_on().then(Vec::new);
        for block in &self.blocks {
            x = as_dtype(x, block.dtype(self.dtype));
            if let Some(inputs) = &mut inputs {
                inputs.push(BlockInput { shape: x.dims(), value: block.reads_input().then(|| x.clone()) });
            }
            x = block.forward(x, &self.store.segment(&format!("{}.", block.name))?)?;
            if let Some(probe) = probe.as_mut() {
                probe(&block.name, &to_host(x.clone())?);
            }
        }
        Ok((as_dtype(x, DType::F32), inputs))
    }

    /// Pulls `cotangent` back through the blocks, last block first. Returns the cotangent of the input in f32.
    fn pull(&self, mut inputs: Vec<BlockInput>, cotangent: Burn<4>) -> Result<Burn<4>> {
        let mut cotangent = cotangent;
        for block in self.blocks.iter().rev() {
            let Some(BlockInput { shape, value }) = inputs.pop() else { break };
            cotangent = as_dtype(cotangent, block.dtype(self.dtype));
            let weights = self.store.segment(&format!("{}.", block.name))?;
            cotangent = block.pull(value, shape, cotangent, &weights)?;
        }
        Ok(as_dtype(cotangent, DType::F32))
    }

    /// Copies a cotangent of shape `expected` to the device, as `dims`.
    fn cotangent(&self, cotangent: &Tensor, expected: [usize; 4], dims: [usize; 4]) -> Result<Burn<4>> {
        if cotangent.shape() != expected {
            return Err(Error::shape("cotangent of the VAE", format!("{expected:?}"), cotangent.shape()));
        }
        to_device(&cotangent.reshape(dims)?, self.store.device())
    }
}
