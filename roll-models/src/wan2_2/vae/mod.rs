//! The Wan VAEs: video to latents and back, with pullbacks whose memory does not grow with the number of frames.
//!
//! Both networks are chains of causal layers ([`layer`]). A video runs through them in chunks, one latent frame each:
//! a convolution sees the last frames of the chunk before in a cache. The result is that of the whole video at once.
//! The pull goes back over the chunks, with gradients flowing through the caches; of the caches at chunk borders only
//! [`Chunking::checkpoints`] are kept, here or in host memory, and the others recomputed ([`schedule`]), and within a
//! chunk one layer at a time is pulled ([`chain`]). Read it beside the official `wan/modules/vae2_1.py` and `vae2_2.py`.

mod chain;
mod clamp;
mod config;
mod conv;
mod fitting;
mod frames;
mod kept;
mod layer;
mod layout;
mod pass;
mod rearrange;
mod recorded;
mod schedule;
mod statistics;
mod tiling;
mod volume;

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor as Burn};
use roll_backends::{Resident, WeightStore};
use roll_core::{Error, Grad, Pullback, Result, StateDict, Tensor};

pub use chain::Probe;
pub use clamp::{Clamped, clamp};
pub use config::{VaeConfig, VaeVersion};
pub(super) use fitting::checkpoints_in_host_memory;
pub use fitting::{Fitting, decoder_bytes, state_bytes};
pub use statistics::LatentStatistics;
pub use tiling::{Tiling, blend_mask};

use chain::CausalChain;
use layer::Layer;
use layout::Layout;
use pass::{Pass, PassTile};
use volume::Volume;

/// How a video is cut into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunking {
    /// Tiles of the plane; `None` takes it whole.
    pub tiling: Option<Tiling>,
    /// Caches at chunk borders that are kept for the pull; fewer take less memory and more time, the numbers are the
    /// same. At 128 x 128 pixels one is about 150 MB in the published Wan2.1 VAE ([`state_bytes`]).
    pub checkpoints: usize,
    /// They wait in host memory. The numbers are the same.
    pub offload: bool,
}

/// Checkpoints where nobody says more: with them at most four fifths of the decoder runs once more for 21 chunks.
pub(super) const FEWEST_CHECKPOINTS: usize = 4;

impl Default for Chunking {
    fn default() -> Self {
        Self { tiling: None, checkpoints: FEWEST_CHECKPOINTS, offload: false }
    }
}

/// Facts that others need of a VAE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VaeFacts {
    /// Architecture.
    pub version: VaeVersion,
    /// Channels of the latents.
    pub z_channels: usize,
    /// Latent pixels to pixels: 8 or 16.
    pub spatial_stride: usize,
    /// Frames that a latent frame stands for (4); the first stands for one.
    pub temporal_stride: usize,
}

impl VaeFacts {
    /// Latent frames of a video of `frames` frames. Fails unless they are a multiple of the stride, plus one.
    pub fn latent_frames(&self, frames: usize) -> Result<usize> {
        let stride = self.temporal_stride;
        match frames > 0 && (frames - 1).is_multiple_of(stride) {
            true => Ok(1 + (frames - 1) / stride),
            false => Err(Error::Unsupported(format!(
                "the VAE takes a multiple of {stride} frames plus one (1, {}, {}, ...), found {frames}",
                1 + stride,
                1 + 2 * stride
            ))),
        }
    }

    /// Latent height and width of a picture. Fails unless they are multiples of the stride.
    pub fn latent_size(&self, size: [usize; 2]) -> Result<[usize; 2]> {
        let stride = self.spatial_stride;
        match size.iter().all(|&n| n > 0 && n.is_multiple_of(stride)) {
            true => Ok(size.map(|n| n / stride)),
            false => Err(Error::Unsupported(format!(
                "the VAE takes heights and widths that are multiples of {stride}, found {} x {}: resize or crop",
                size[0], size[1]
            ))),
        }
    }
}

/// Frames as a viewer sees them.
#[derive(Debug)]
pub struct Decoded {
    /// f32 `[T', 3, H', W']` in [-1, 1].
    pub frames: Tensor,
    /// Part of the values that the clamp changed, in [0, 1]; they get no gradient.
    pub clamped_fraction: f64,
    /// To the cotangent of the latents.
    pub pullback: Option<Pullback>,
}

/// A Wan VAE with frozen weights. Clones share them.
#[derive(Clone)]
pub struct Vae {
    config: VaeConfig,
    facts: VaeFacts,
    encoder: Arc<CausalChain>,
    decoder: Arc<CausalChain>,
}

impl Vae {
    /// Loads a checkpoint in official keys (a `model.` prefix is accepted), with the published latent statistics.
    /// Fails, naming the key, when a weight is missing or misshapen.
    pub fn load(state: &StateDict, device: &Device) -> Result<Self> {
        let channels = VaeConfig::from_shapes(&shapes(state))?.z_dim;
        let statistics = LatentStatistics::published(channels).ok_or_else(|| {
            Error::Unsupported(format!(
                "no statistics are published for latents of {channels} channels (there are for 16 and 48); give the \
                 mean and standard deviation of each"
            ))
        })?;
        Self::load_with_statistics(state, &statistics, device)
    }

    /// As [`Vae::load`], with latent statistics of one's own.
    pub fn load_with_statistics(state: &StateDict, statistics: &LatentStatistics, device: &Device) -> Result<Self> {
        let config = VaeConfig::from_shapes(&shapes(state))?;
        let wanted: BTreeMap<_, _> = config.weights().into_iter().collect();
        let weights = state.iter().map(|(key, tensor)| (official(key).to_string(), tensor.clone()));
        let weights: StateDict = weights.filter(|(key, _)| wanted.contains_key(key)).collect();
        Self::with_store(config, statistics, Arc::new(Resident::new(&weights, DType::F32, device)))
    }

    /// Takes weights from a store, in official keys.
    pub fn with_store(config: VaeConfig, statistics: &LatentStatistics, store: Arc<dyn WeightStore>) -> Result<Self> {
        let facts = VaeFacts {
            version: config.version,
            z_channels: config.z_dim,
            spatial_stride: config.spatial_stride(),
            temporal_stride: config.temporal_stride(),
        };
        let on_device = |what: &str, values: &[f32]| {
            if values.len() != config.z_dim {
                let expected = format!("[{}], one value per latent channel", config.z_dim);
                return Err(Error::shape(format!("latent {what}"), expected, &[values.len()]));
            }
            if let Some(bad) = values.iter().find(|v| !v.is_finite() || (what == "std" && **v <= 0.0)) {
                return Err(Error::NonFinite { what: format!("a latent {what}"), value: f64::from(*bad) });
            }
            Ok(Burn::<1>::from_data(values, (store.device(), DType::F32)))
        };
        let statistics =
            layer::Statistics { mean: on_device("mean", &statistics.mean)?, std: on_device("std", &statistics.std)? };
        let layout = Layout::of(store.device());
        let chain = |layers: Vec<Layer>, layout| {
            let (statistics, store) = (statistics.clone(), store.clone());
            Arc::new(CausalChain { layers, statistics, store, dtype: DType::F32, layout })
        };
        // Pictures are encoded once in a run.
        let (encoder, decoder) =
            (chain(config.encoder_layers(), Layout::Outermost), chain(config.decoder_layers(), layout));
        Ok(Self { config, facts, encoder, decoder })
    }

    /// Computes the decoder in `dtype`, f32 or bf16. In bf16 weights and activations are rounded to it and sums are f32;
    /// latents, attention and the last layer, which makes the frames, stay f32, and so does the encoder. Fails on other
    /// dtypes, and where the device has no bf16.
    pub fn decoding_in(self, dtype: DType) -> Result<Self> {
        let device = self.decoder.store.device();
        if !matches!(dtype, DType::F32 | DType::BF16) || !device.supports_dtype(dtype) {
            let problem = format!("the device cannot decode in {dtype:?}: expected f32, or bf16 where a device has it");
            return Err(Error::Unsupported(problem));
        }
        Ok(self.with_decoder(|decoder| decoder.dtype = dtype))
    }

    /// Bytes of a number between two layers of the decoder.
    pub fn decoding_bytes(&self) -> usize {
        self.decoder.dtype.size()
    }

    fn with_decoder(self, change: impl FnOnce(&mut CausalChain)) -> Self {
        let CausalChain { layers, statistics, store, dtype, layout } = &*self.decoder;
        let (layers, statistics, store) = (layers.clone(), statistics.clone(), store.clone());
        let mut decoder = CausalChain { layers, statistics, store, dtype: *dtype, layout: *layout };
        change(&mut decoder);
        Self { decoder: Arc::new(decoder), ..self }
    }

    /// Facts of the checkpoint.
    pub fn facts(&self) -> VaeFacts {
        self.facts
    }

    /// Shape of the networks.
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// Latents `[C, T, H, W]`, normalised, of a video, f32 `[T', 3, H', W']` in [-1, 1].
    pub fn encode(&self, video: &Tensor) -> Result<Tensor> {
        Ok(self.encode_with(video, &Chunking::default(), Grad::Skip)?.0)
    }

    /// As [`Vae::encode`], with a pullback to the cotangent of the video.
    pub fn encode_with(&self, video: &Tensor, chunking: &Chunking, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let &[frames, 3, h, w] = video.shape() else {
            return Err(Error::shape("video to encode", "[T, 3, H, W]", video.shape()));
        };
        let latent_frames = self.facts.latent_frames(frames)?;
        let size = self.facts.latent_size([h, w])?;
        let tiles = Tiling::tiles(chunking.tiling.as_ref(), size, 1)?;
        let pass = Pass {
            chain: self.encoder.clone(),
            input: Volume { channels: 3, frames, size: [h, w], frames_first: true },
            output: Volume { channels: self.facts.z_channels, frames: latent_frames, size, frames_first: false },
            chunk: [self.facts.temporal_stride, 1],
            chunks: latent_frames,
            tiles: tiles.into_iter().map(|tile| PassTile::new(tile, self.facts.spatial_stride)).collect(),
            checkpoints: chunking.checkpoints,
            offload: chunking.offload,
        };
        pass.run(video, grad, None)
    }

    /// Frames, f32 `[T', 3, H', W']`, not clamped, of normalised latents, f32 `[C, T, H, W]`; the pullback gives the
    /// cotangent of the latents.
    pub fn decode(&self, latents: &Tensor, chunking: &Chunking, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        self.decoding(latents, chunking)?.run(latents, grad, None)
    }

    /// As [`Vae::decode`], clamped to [-1, 1].
    pub fn decode_clamped(&self, latents: &Tensor, chunking: &Chunking, grad: Grad) -> Result<Decoded> {
        let (frames, pullback) = self.decode(latents, chunking, grad)?;
        let Clamped { frames, fraction, pullback: unclamp } = clamp(&frames)?;
        let pullback =
            pullback.map(|pullback| Pullback::new(move |cotangent| pullback.pull(&unclamp.pull(cotangent)?)));
        Ok(Decoded { frames, clamped_fraction: fraction, pullback })
    }

    /// As [`Vae::decode`] without gradient and tiles, showing every layer's value, chunk by chunk, to `probe`.
    pub fn decode_probed(&self, latents: &Tensor, probe: Probe<'_>) -> Result<Tensor> {
        Ok(self.decoding(latents, &Chunking::default())?.run(latents, Grad::Skip, Some(probe))?.0)
    }

    fn decoding(&self, latents: &Tensor, chunking: &Chunking) -> Result<Pass> {
        let VaeFacts { z_channels, spatial_stride, temporal_stride, .. } = self.facts;
        let (frames, size) = match *latents.shape() {
            [c, t, h, w] if c == z_channels && t > 0 && h > 0 && w > 0 => (t, [h, w]),
            _ => {
                let expected = format!("[{z_channels}, T, H, W], each at least 1");
                return Err(Error::shape("latents to decode", expected, latents.shape()));
            }
        };
        let output = Volume {
            channels: 3,
            frames: 1 + (frames - 1) * temporal_stride,
            size: size.map(|n| n * spatial_stride),
            frames_first: true,
        };
        let tiles = Tiling::tiles(chunking.tiling.as_ref(), size, spatial_stride)?;
        Ok(Pass {
            chain: self.decoder.clone(),
            input: Volume { channels: z_channels, frames, size, frames_first: false },
            output,
            chunk: [1, temporal_stride],
            chunks: frames,
            tiles: tiles.into_iter().map(|tile| PassTile::new(tile, 1)).collect(),
            checkpoints: chunking.checkpoints,
            offload: chunking.offload,
        })
    }
}

fn shapes(state: &StateDict) -> BTreeMap<String, Vec<usize>> {
    state.iter().map(|(key, tensor)| (official(key).to_string(), tensor.shape().to_vec())).collect()
}

/// The official key of a weight: some files put `model.` before it.
fn official(key: &str) -> &str {
    key.strip_prefix("model.").unwrap_or(key)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
