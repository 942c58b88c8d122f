//! The Wan VAEs encode videos to latents and decode latents to videos. The memory of their pullbacks does not grow with
//! the number of frames.
//!
//! Both networks, the encoder and the decoder, are chains of causal layers (`layer`). A video passes through them in
//! chunks of one latent frame; convolutions read the last frames of the previous chunk from a feature cache. The result
//! is the same as if the whole video passed at once.
//!
//! The pullback visits the chunks in reverse order, with gradients flowing through the caches. The cache before each
//! chunk is needed again. The cache before the first chunk and at most [`Chunking::checkpoints`] other caches are
//! stored for this, on the device or in host memory; the rest is recomputed from the stored ones (`schedule`). Within a
//! chunk, one layer at a time is pulled back (`chain`). Names and order of the layers follow the official
//! `wan/modules/vae2_1.py` and `vae2_2.py`.

mod chain;
mod checkpointed;
mod clamp;
mod config;
mod conv;
mod frames;
mod layer;
mod layout;
mod memory_budget;
mod pass;
mod rearrange;
mod recorded;
mod schedule;
mod statistics;
mod tiling;
mod volume;

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{DType, Device, Tensor as Burn};
use roll_backends::{Resident, WeightStore};
use roll_core::{Error, Grad, Pullback, Result, StateDict, Tensor};

pub use chain::Probe;
pub use config::{VaeConfig, VaeVersion};
pub(super) use memory_budget::checkpoints_in_host_memory;
pub use memory_budget::{MemoryBudget, RESTORED_STATES, decoder_bytes, feature_cache_bytes};
pub use statistics::LatentStatistics;
pub use tiling::{Tiling, blend_mask};

use chain::CausalChain;
use layer::Layer;
use layout::ChunkLayout;
use pass::Pass;
use volume::Volume;

/// How a video is tiled, and what the pullback keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunking {
    /// Tiles of the latent plane; `None` processes whole frames.
    pub tiling: Option<Tiling>,
    /// Number of feature caches between two chunks that are stored for the pullback. Fewer caches need less memory and
    /// more time; the results are the same. At 128 x 128 pixels one cache of the published Wan2.1 VAE takes about 150
    /// MB ([`feature_cache_bytes`]).
    pub checkpoints: usize,
    /// Whether these caches are stored in host memory instead of on the device. The results are the same.
    pub offload: bool,
}

/// Default number of checkpoints. With it, the pullback of 21 chunks recomputes about four fifths of the decoder's
/// forward pass (17 chunks).
pub(super) const DEFAULT_CHECKPOINTS: usize = 4;

impl Default for Chunking {
    fn default() -> Self {
        Self { tiling: None, checkpoints: DEFAULT_CHECKPOINTS, offload: false }
    }
}

/// A Wan VAE with frozen weights. Clones share the weights.
#[derive(Clone)]
pub struct Vae {
    config: VaeConfig,
    encoder: Arc<CausalChain>,
    decoder: Arc<CausalChain>,
}

impl Vae {
    /// Loads a checkpoint with official keys (a prefix `model.` is accepted) and the published latent statistics. Fails
    /// if a weight is missing or has another shape, and names its key.
    pub fn load(state: &StateDict, device: &Device) -> Result<Self> {
        let channels = VaeConfig::from_shapes(&shapes(state))?.z_dim;
        let statistics = LatentStatistics::published(channels).ok_or_else(|| {
            Error::Unsupported(format!(
                "no statistics are published for latents of {channels} channels, only for 16 and 48; give the mean and \
                 standard deviation of each channel"
            ))
        })?;
        Self::load_with_statistics(state, &statistics, device)
    }

    /// Loads a checkpoint like [`Vae::load`], with other latent statistics.
    pub fn load_with_statistics(state: &StateDict, statistics: &LatentStatistics, device: &Device) -> Result<Self> {
        let config = VaeConfig::from_shapes(&shapes(state))?;
        let wanted: BTreeMap<_, _> = config.weights().into_iter().collect();
        let weights = state.iter().map(|(key, tensor)| (official_key(key).to_string(), tensor.clone()));
        let weights: StateDict = weights.filter(|(key, _)| wanted.contains_key(key)).collect();
        Self::with_store(config, statistics, Arc::new(Resident::new(&weights, DType::F32, device)))
    }

    /// Creates a VAE with the weights of a store, under official keys. Fails unless there is one finite mean and one
    /// positive deviation per latent channel.
    pub fn with_store(config: VaeConfig, statistics: &LatentStatistics, store: Arc<dyn WeightStore>) -> Result<Self> {
        // Checks a mean or a deviation (`what`), and copies it to the device.
        let on_device = |what: &str, values: &[f32]| {
            if values.len() != config.z_dim {
                let expected = format!("[{}], one value per latent channel", config.z_dim);
                return Err(Error::shape(format!("latent {what}"), expected, &[values.len()]));
            }
            if let Some(bad) = values.iter().find(|v| !v.is_finite() || (what == "std" && **v <= 0.0)) {
                let expected = if what == "std" { "a positive, finite number" } else { "a finite number" };
                return Err(Error::Misuse(format!("the {what} of a latent channel: expected {expected}, found {bad}")));
            }
            Ok(Burn::<1>::from_data(values, (store.device(), DType::F32)).reshape([config.z_dim, 1, 1, 1]))
        };
        let statistics =
            layer::Statistics { mean: on_device("mean", &statistics.mean)?, std: on_device("std", &statistics.std)? };
        let decoder_layout = ChunkLayout::of(store.device());
        let chain = |layers: Vec<Layer>, layout| {
            let (statistics, store) = (statistics.clone(), store.clone());
            Arc::new(CausalChain { layers, statistics, store, dtype: DType::F32, layout })
        };
        // Pictures are encoded once per run, so the encoder's speed matters little: it uses one layout on all devices.
        let encoder = chain(config.encoder_layers(), ChunkLayout::ChannelsFirst);
        let decoder = chain(config.decoder_layers(), decoder_layout);
        Ok(Self { config, encoder, decoder })
    }

    /// Sets the dtype of the decoder: f32 or bf16. In bf16, weights and activations are rounded and sums are f32;
    /// latents, attention, the last layer (which produces the frames) and the encoder stay f32. Fails on other dtypes,
    /// and on bf16 if the device has none.
    pub fn with_decoder_dtype(self, dtype: DType) -> Result<Self> {
        let device = self.decoder.store.device();
        if !matches!(dtype, DType::F32 | DType::BF16) || !device.supports_dtype(dtype) {
            let problem = format!("the device cannot decode in {dtype:?}: expected f32, or bf16 where a device has it");
            return Err(Error::Unsupported(problem));
        }
        Ok(self.with_decoder(|decoder| decoder.dtype = dtype))
    }

    /// Bytes per element between two layers of the decoder.
    pub fn decoder_element_bytes(&self) -> usize {
        self.decoder.dtype.size()
    }

    /// Changes the decoder of this clone; other clones keep theirs.
    fn with_decoder(self, change: impl FnOnce(&mut CausalChain)) -> Self {
        let mut decoder = (*self.decoder).clone();
        change(&mut decoder);
        Self { decoder: Arc::new(decoder), ..self }
    }

    /// Sizes of the networks.
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// Encodes a video, f32 `[T', 3, H', W']` in [-1, 1], as normalised latents, f32 `[C, T, H, W]`.
    pub fn encode(&self, video: &Tensor) -> Result<Tensor> {
        Ok(self.encode_with(video, &Chunking::default(), Grad::Skip)?.0)
    }

    /// Encodes a video like [`Vae::encode`]. The pullback returns the cotangent of the video.
    pub fn encode_with(&self, video: &Tensor, chunking: &Chunking, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let &[frames, 3, h, w] = video.shape() else {
            return Err(Error::shape("video to encode", "[T, 3, H, W]", video.shape()));
        };
        let config = &self.config;
        let latent_frames = config.latent_frames(frames)?;
        let latent_size = config.latent_size([h, w])?;
        let [input_scale, output_scale] = [config.spatial_stride(), 1];
        let pass = Pass {
            chain: self.encoder.clone(),
            input: Volume { channels: 3, frames, size: [h, w], frames_first: true },
            output: Volume { channels: config.z_dim, frames: latent_frames, size: latent_size, frames_first: false },
            input_chunk: config.temporal_stride(),
            output_chunk: 1,
            chunks: latent_frames,
            tiles: Tiling::tiles(chunking.tiling.as_ref(), latent_size, [input_scale, output_scale])?,
            checkpoints: chunking.checkpoints,
            offloads_checkpoints: chunking.offload,
        };
        pass.run(video, grad)
    }

    /// Decodes normalised latents, f32 `[C, T, H, W]`, to frames, f32 `[T', 3, H', W']`, not clamped. The pullback
    /// returns the cotangent of the latents.
    pub fn decode(&self, latents: &Tensor, chunking: &Chunking, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        self.decoder_pass(latents, chunking)?.run(latents, grad)
    }

    /// Decodes latents like [`Vae::decode`], with frames clamped to [-1, 1]. Values that the clamp changed receive no
    /// gradient.
    pub fn decode_clamped(
        &self,
        latents: &Tensor,
        chunking: &Chunking,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.decoder_pass(latents, chunking)?.run_clamped(latents, grad)
    }

    /// Decodes latents like [`Vae::decode`], without gradient and tiles. `probe` receives every layer's output, chunk
    /// by chunk.
    pub fn decode_probed(&self, latents: &Tensor, probe: Probe<'_>) -> Result<Tensor> {
        self.decoder_pass(latents, &Chunking::default())?.run_probed(latents, probe)
    }

    /// The decoder's pass over latents of this shape, not run yet.
    fn decoder_pass(&self, latents: &Tensor, chunking: &Chunking) -> Result<Pass> {
        let config = &self.config;
        let [latent_frames, h, w] = self.check_latents(latents.shape())?;
        let latent_size = [h, w];
        let frames = 1 + (latent_frames - 1) * config.temporal_stride();
        let [input_scale, output_scale] = [1, config.spatial_stride()];
        Ok(Pass {
            chain: self.decoder.clone(),
            input: Volume { channels: config.z_dim, frames: latent_frames, size: latent_size, frames_first: false },
            output: Volume { channels: 3, frames, size: latent_size.map(|n| n * output_scale), frames_first: true },
            input_chunk: 1,
            output_chunk: config.temporal_stride(),
            chunks: latent_frames,
            tiles: Tiling::tiles(chunking.tiling.as_ref(), latent_size, [input_scale, output_scale])?,
            checkpoints: chunking.checkpoints,
            offloads_checkpoints: chunking.offload,
        })
    }

    /// Returns frames, height and width of latents. Fails unless their shape is `[C, T, H, W]`, and not empty.
    fn check_latents(&self, shape: &[usize]) -> Result<[usize; 3]> {
        let channels = self.config.z_dim;
        match *shape {
            [c, t, h, w] if c == channels && t > 0 && h > 0 && w > 0 => Ok([t, h, w]),
            _ => Err(Error::shape("latents to decode", format!("[{channels}, T, H, W], each at least 1"), shape)),
        }
    }
}

/// Shapes of the weights, under their official keys.
fn shapes(state: &StateDict) -> BTreeMap<String, Vec<usize>> {
    state.iter().map(|(key, tensor)| (official_key(key).to_string(), tensor.shape().to_vec())).collect()
}

/// The official key of a weight. Some files put `model.` before it.
fn official_key(key: &str) -> &str {
    key.strip_prefix("model.").unwrap_or(key)
}

#[cfg(test)]
mod tests;
