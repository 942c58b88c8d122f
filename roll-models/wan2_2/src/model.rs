//! The Wan model as algorithms see it: experts, VAE and encoders behind the traits of roll-core.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use roll_backends::Memory;
use roll_core::{
    Adapter, ConditionInput, Conditioning, DiffusionModel, Distribution, Error, Grad, Model, ParameterParts,
    ParameterSpec, Pullback, Result, ScheduleFacts, StateDict, Tensor, Timestep, VelocityInput, VideoUnit,
    WeightPlacement,
};
use roll_external::Fingerprint;
use roll_network::prompts::Prompts;

use super::adapter_io;
use super::clip::Clip;
use super::conditioning;
use super::dit::{Dit, DitConfig, PassMemory};
use super::expert::{Expert, trained_levels};
use super::layout::{CheckpointCount, Layout, VideoLayout};
use super::prompts::{self, TextEncoder};
use super::vae::{Chunking, Vae, VaeConfig, checkpoints_in_host_memory, feature_cache_bytes};

/// Noise level at which I2V models switch experts.
const I2V_BOUNDARY: f64 = 0.9;
/// Noise level at which T2V models switch experts.
const T2V_BOUNDARY: f64 = 0.875;
/// Shift of the noise levels in the official inference of T2V-A14B. Distilled T2V models, ROLL and DiffSynth-Studio use
/// 5.
const T2V_A14B_SHIFT: f64 = 12.0;
/// Shift of the noise levels in all other models' inference. Wan2.1 I2V uses 3 at 480p.
const SHIFT: f64 = 5.0;
/// Spatial stride of the VAE of TI2V-5B. No other Wan VAE has it.
const TI2V_SPATIAL_STRIDE: usize = 16;
/// Frames per second of the videos of TI2V-5B.
const TI2V_FRAME_RATE: f64 = 24.0;
/// Frames per second of the videos of all other models.
const FRAME_RATE: f64 = 16.0;
/// Channels of an I2V model's input that mark the known frames.
const MASK_CHANNELS: usize = 4;

/// The networks of a checkpoint.
pub struct Parts {
    /// The only transformer or the high-noise expert.
    pub dit: Dit,
    /// The low-noise expert.
    pub dit2: Option<Dit>,
    /// Encoder and decoder of the latents.
    pub vae: Vae,
    /// Text encoder; without it, prompts cannot be encoded.
    pub text: Option<TextEncoder>,
    /// Image encoder of Wan2.1 I2V.
    pub clip: Option<Clip>,
}

/// Settings of the networks.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Shift of the noise levels, instead of that of the model's official inference.
    pub shift: Option<f64>,
    /// Noise level at which experts switch, instead of the model's own.
    pub boundary: Option<f64>,
    /// Whether an end image, the last frame of the video, is a condition, too.
    pub uses_end_image: bool,
    /// Tiling and memory of the VAE.
    pub chunking: Chunking,
}

/// A Wan model.
pub struct Wan {
    pub(super) experts: Vec<Expert>,
    vae: Vae,
    text: Option<TextEncoder>,
    prompts: Prompts,
    clip: Option<Clip>,
    schedule: ScheduleFacts,
    uses_end_image: bool,
    chunking: Chunking,
    /// If set, it replaces `chunking` in determining the tiles and checkpoints of the VAE. It also replaces the
    /// transformers' own settings in determining what recorded passes keep on the device.
    pub(super) layout: Option<Layout>,
    /// Number of recorded passes with block inputs on the device although those of other passes are in host memory.
    passes_on_device: Arc<AtomicUsize>,
    /// Number of checkpoints in host memory by the shape of the latents, as free memory determined it the first time.
    /// Later results would differ, because an allocator may keep freed memory reserved.
    checkpoints: Mutex<BTreeMap<[usize; 3], usize>>,
    pub(super) specs: Vec<ParameterSpec>,
    /// If set, encodings can be cached.
    pub(super) encoding_sources: Option<EncodingSources>,
    /// Location of the experts' frozen weights.
    pub(super) placement: Option<WeightPlacement>,
}

/// Files and settings that encodings depend on.
pub(super) struct EncodingSources {
    /// Files of the VAE, text encoder, tokenizer and image encoder.
    pub(super) files: Vec<PathBuf>,
    /// A description of all settings that encodings depend on.
    pub(super) settings: String,
}

/// A guard that counts recorded passes whose block inputs are on the device, until it is dropped.
struct PassesOnDevice {
    count: usize,
    /// Number of such passes of all guards.
    all: Arc<AtomicUsize>,
}

impl PassesOnDevice {
    /// Adds `count` passes to `all`. Returns `None`, and adds nothing, if `all` would exceed `most`.
    fn try_add(count: usize, all: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let add = |passes: usize| Some(passes + count).filter(|sum| *sum <= most);
        all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Self { count, all: all.clone() })
    }
}

impl Drop for PassesOnDevice {
    fn drop(&mut self) {
        self.all.fetch_sub(self.count, Ordering::Relaxed);
    }
}

impl Wan {
    /// Combines the networks. The experts' trainable parameters must be set already.
    pub fn new(parts: Parts, settings: Settings) -> Self {
        let config = parts.dit.config().clone();
        let from_text = config.in_channels == config.out_channels;
        let default_boundary = if from_text { T2V_BOUNDARY } else { I2V_BOUNDARY };
        let default_shift = if from_text && parts.dit2.is_some() { T2V_A14B_SHIFT } else { SHIFT };
        let shift = settings.shift.unwrap_or(default_shift);
        let boundary = parts.dit2.as_ref().map(|_| settings.boundary.unwrap_or(default_boundary));
        let experts: Vec<_> = [("dit", Some(parts.dit)), ("dit2", parts.dit2)]
            .into_iter()
            .filter_map(|(name, dit)| Some((name, dit?)))
            .map(|(name, dit)| Expert::new(name, dit))
            .collect();
        let specs = experts.iter().flat_map(Expert::specs).collect();
        let trained = trained_levels(&experts, boundary);
        Self {
            experts,
            vae: parts.vae,
            text: parts.text,
            prompts: Prompts::default(),
            clip: parts.clip,
            schedule: ScheduleFacts { shift, boundary, trained },
            uses_end_image: settings.uses_end_image,
            chunking: settings.chunking,
            layout: None,
            passes_on_device: Arc::default(),
            checkpoints: Mutex::default(),
            specs,
            encoding_sources: None,
            placement: None,
        }
    }

    /// Index of the expert for `timestep`: the first at or above the boundary, the second below.
    fn expert_index(&self, timestep: Timestep) -> usize {
        let uses_second = |boundary| self.experts.len() > 1 && timestep.uses_low_noise(boundary);
        usize::from(self.schedule.boundary.is_some_and(uses_second))
    }

    /// What a video with latents of shape [T, H, W] keeps on the device, if the model has a layout.
    fn video_layout(&self, latents: [usize; 3]) -> Option<VideoLayout> {
        self.layout.as_ref().map(|layout| layout.video(self.parameter_count(), latents))
    }

    /// What a recorded pass of `count` videos with latents of `shape` keeps. If its block inputs stay on the device
    /// although the block inputs of other passes are in host memory, also returns the guard that counts the pass until
    /// it is pulled back or dropped.
    fn pass_memory(&self, dit: &Dit, count: usize, shape: &[usize]) -> (PassMemory, Option<PassesOnDevice>) {
        let default = dit.settings().kept;
        let [_, t, h, w] = shape else { return (default, None) };
        let Some(video) = self.video_layout([*t, *h, *w]) else { return (default, None) };
        let by_layout = PassMemory { keeps_attention: video.keep_attention, ..default };
        if by_layout.memory != Memory::Offload {
            return (by_layout, None);
        }
        match PassesOnDevice::try_add(count, &self.passes_on_device, video.passes_on_device) {
            // The block inputs fit on the device.
            Some(guard) => (PassMemory { memory: Memory::Recompute, ..by_layout }, Some(guard)),
            None => (by_layout, None),
        }
    }

    /// Tiling and checkpoints of the VAE for latents of shape [T, H, W].
    fn chunking_for(&self, latents: [usize; 3]) -> Chunking {
        let Some(VideoLayout { tiling, checkpoints, .. }) = self.video_layout(latents) else { return self.chunking };
        let checkpoints = match checkpoints {
            CheckpointCount::Of(count) => count,
            CheckpointCount::InHostMemory => {
                let [chunks, h, w] = latents;
                let state = feature_cache_bytes(self.vae.config(), tiling, [h, w], self.vae.decoder_element_bytes());
                let mut known = self.checkpoints.lock().unwrap_or_else(PoisonError::into_inner);
                *known.entry(latents).or_insert_with(|| checkpoints_in_host_memory(chunks, state))
            }
        };
        Chunking { tiling, checkpoints, ..self.chunking }
    }

    /// Whether the model is TI2V-5B, by its VAE.
    fn is_ti2v(&self) -> bool {
        self.vae.config().spatial_stride() == TI2V_SPATIAL_STRIDE
    }

    /// Shape of the latents of a video, [C, T, H, W]. Fails unless the model can represent its size and length.
    fn latent_shape(&self, frames: usize, [height, width]: [usize; 2]) -> Result<[usize; 4]> {
        let config = self.vae.config();
        let frames = config.latent_frames(frames)?;
        let unit = self.video_unit();
        if !unit.has_size([height, width]) {
            return Err(Error::Unsupported(format!(
                "a video of {width}x{height} pixels: this model needs multiples of {}x{}",
                unit.width, unit.height
            )));
        }
        let [height, width] = config.latent_size([height, width])?;
        Ok([config.z_dim, frames, height, width])
    }
}

impl Model for Wan {
    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }

    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.read_part(0..self.specs.len(), out)
    }

    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.write_part(0..self.specs.len(), values)
    }

    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.take_gradients_part(0..self.specs.len(), add_into)
    }

    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        Some(self)
    }

    fn distribution(&self) -> Distribution {
        let token_ranks = self.experts.iter().map(|e| e.dit.token_ranks()).max().unwrap_or(1);
        Distribution { weights: self.placement, token_ranks }
    }

    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        Some(self)
    }

    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        adapter_io::export(&self.experts)
    }

    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        adapter_io::import(&self.experts, files)
    }
}

impl DiffusionModel for Wan {
    fn encoding_key(&self) -> Result<Option<String>> {
        let Some(EncodingSources { files, settings }) = &self.encoding_sources else { return Ok(None) };
        // The number of input channels determines which conditioning a transformer receives.
        let channels = self.experts[0].dit.config().in_channels;
        let key = Fingerprint::new("wan").text("settings", settings).text("channels", channels);
        files.iter().try_fold(key, |key, file| key.file(file)).map(|key| Some(key.finish()))
    }

    fn schedule(&self) -> ScheduleFacts {
        self.schedule
    }

    fn video_unit(&self) -> VideoUnit {
        video_unit(self.vae.config(), self.experts[0].dit.config())
    }

    fn frame_rate(&self) -> Option<f64> {
        Some(if self.is_ti2v() { TI2V_FRAME_RATE } else { FRAME_RATE })
    }

    fn expect_prompts(&mut self, prompts: &[String]) {
        prompts::expect(&mut self.prompts, prompts, self.text.as_ref());
    }

    fn takes_image(&self) -> bool {
        let config = self.experts[0].dit.config();
        config.in_channels > config.out_channels || self.is_ti2v()
    }

    fn check_input(&mut self, input: &ConditionInput) -> Result<()> {
        self.latent_shape(input.frames, input.size)?;
        for (what, image) in [("image", &input.image), ("end image", &input.end_image)] {
            if let Some(image) = image
                && image.shape() != [3, input.size[0], input.size[1]]
            {
                let expected = format!("[3, {}, {}]", input.size[0], input.size[1]);
                return Err(Error::shape(what, expected, image.shape()));
            }
        }
        let config = self.experts[0].dit.config();
        if config.in_channels > config.out_channels && input.image.is_none() {
            return Err(Error::Unsupported(
                "this is an image-to-video model: it needs a picture, `--image` of `roll generate`, and in training a \
                 clip or a picture (columns `video` and `image`)"
                    .into(),
            ));
        }
        require_encoder(&self.text).map(drop)
    }

    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning> {
        self.check_input(input)?;
        let latent_shape = self.latent_shape(input.frames, input.size)?;
        let text = require_encoder(&self.text)?;
        let [_, t, h, w] = latent_shape;
        let chunking = self.chunking_for([t, h, w]);
        let config = self.experts[0].dit.config();
        let extra_channels = config.in_channels - config.out_channels;
        let channels = match (extra_channels, &input.image) {
            // The transformer reads latents only.
            (0, _) => None,
            // The transformer also reads the encoded picture and a mask of the known frames.
            (n, Some(image)) if n == MASK_CHANNELS + latent_shape[0] => {
                let end_image = if self.uses_end_image { input.end_image.as_ref() } else { None };
                Some(conditioning::image_channels(&self.vae, image, end_image, input.frames, &chunking)?)
            }
            (n, _) => {
                return Err(Error::Unsupported(format!("models with {n} conditioning channels are not known")));
            }
        };
        // TI2V-5B has no conditioning channels and uses the image as its first latent frame. Text-to-video models use
        // no image.
        let first_frame = match (extra_channels, &input.image) {
            (0, Some(image)) if self.is_ti2v() => Some(conditioning::first_frame_latents(&self.vae, image, &chunking)?),
            _ => None,
        };
        let image_tokens = match (&self.clip, config.image_dim, &input.image) {
            (Some(clip), Some(_), Some(image)) => Some(clip.encode(image)?),
            _ => None,
        };
        let context = prompts::embedding(&mut self.prompts, &input.prompt, text)?;
        Ok(Conditioning { context, channels, image_tokens, first_frame, latent_shape })
    }

    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let input = VelocityInput { latents, timestep, conditioning };
        let (velocities, pullback) = self.velocities(&[input], adapter, grad)?;
        let (shape, batch_shape) = (latents.shape().to_vec(), velocities.shape().to_vec());
        let pullback = pullback.map(|pullback| {
            Pullback::new(move |cotangent: &Tensor| pullback.pull(&cotangent.reshape(batch_shape)?)?.reshape(shape))
        });
        Ok((velocities.reshape(latents.shape())?, pullback))
    }

    fn velocities(
        &mut self,
        inputs: &[VelocityInput<'_>],
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let expert_by_input: Vec<usize> = inputs.iter().map(|input| self.expert_index(input.timestep)).collect();
        let (mut values, mut pullbacks) = (vec![None; inputs.len()], Vec::new());
        for (number, expert) in self.experts.iter().enumerate() {
            let positions: Vec<usize> = (0..inputs.len()).filter(|i| expert_by_input[*i] == number).collect();
            if positions.is_empty() {
                continue;
            }
            let batch: Vec<VelocityInput<'_>> = positions.iter().map(|i| inputs[*i]).collect();
            let (kept, guard) = if grad.is_on() {
                self.pass_memory(&expert.dit, batch.len(), batch[0].latents.shape())
            } else {
                (expert.dit.settings().kept, None)
            };
            let (value, pullback) = expert.dit.velocities_keeping(&batch, adapter, grad, kept)?;
            scatter(&mut values, &positions, value)?;
            pullbacks.extend(pullback.map(|pullback| (positions, pullback, guard)));
        }
        let count = inputs.len();
        let pull = move |cotangents: &Tensor| {
            let (cotangents, mut pulled) = (cotangents.unstack()?, vec![None; count]);
            // `_guard` is dropped after its pass has been pulled back.
            for (positions, pullback, _guard) in pullbacks {
                let batch: Vec<Tensor> = positions.iter().map(|i| cotangents[*i].clone()).collect();
                scatter(&mut pulled, &positions, pullback.pull(&Tensor::stack(&batch)?)?)?;
            }
            stack_all(pulled)
        };
        Ok((stack_all(values)?, grad.is_on().then(|| Pullback::new(pull))))
    }

    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let chunking = match *latents.shape() {
            [_, t, h, w] => self.chunking_for([t, h, w]),
            _ => self.chunking,
        };
        self.vae.decode_clamped(latents, &chunking, grad)
    }

    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        let chunking = match *frames.shape() {
            [count, _, height, width] => {
                let config = self.vae.config();
                let [h, w] = config.latent_size([height, width])?;
                self.chunking_for([config.latent_frames(count)?, h, w])
            }
            _ => self.chunking,
        };
        Ok(self.vae.encode_with(frames, &chunking, Grad::Skip)?.0)
    }
}

/// The text encoder. Fails if the model has none.
fn require_encoder(text: &Option<TextEncoder>) -> Result<&TextEncoder> {
    text.as_ref().ok_or_else(|| {
        Error::Unsupported("prompts need a UMT5 encoder among `model_paths` and a `tokenizer_path`".into())
    })
}

/// The unit of the video sizes that a VAE and a transformer can process.
pub(super) fn video_unit(vae: &VaeConfig, dit: &DitConfig) -> VideoUnit {
    let ([_, height, width], stride) = (dit.patch, vae.spatial_stride());
    VideoUnit { height: stride * height, width: stride * width, frames: vae.temporal_stride(), most_frames: None }
}

/// Stores the tensors of `stack` in the slots at `positions`.
fn scatter(slots: &mut [Option<Tensor>], positions: &[usize], stack: Tensor) -> Result<()> {
    for (position, part) in positions.iter().zip(stack.unstack()?) {
        slots[*position] = Some(part);
    }
    Ok(())
}

/// Stacks the tensors of all slots, which must be filled.
fn stack_all(slots: Vec<Option<Tensor>>) -> Result<Tensor> {
    Tensor::stack(&slots.into_iter().flatten().collect::<Vec<_>>())
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
