//! Z-Image as algorithms see it: transformer, VAE and text encoder behind the traits of roll-core. A picture is a video
//! of one frame.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use roll_backends::Parameters;
use roll_core::{
    Adapter, ConditionInput, Conditioning, DeviceUpdates, DiffusionModel, Distribution, Error, Grad, GradientSink,
    Model, ParameterParts, ParameterSpec, Pullback, Result, ScheduleFacts, SigmaRange, StateDict, Tensor, Timestep,
    VelocityInput, VideoUnit, WeightPlacement,
};
use roll_external::Fingerprint;
use roll_network::lora::BaseNetwork;
use roll_network::prompts::Prompts;

use crate::adapter_io;
use crate::dit::{Dit, DitConfig, PATCH, PassMemory};
use crate::layout::Layout;
use crate::text::PromptEncoder;
use crate::vae::{Vae, VaeConfig};

/// The networks of a checkpoint.
pub struct Networks {
    /// The transformer. Its trainable parameters must be set already.
    pub dit: Dit,
    /// Encoder and decoder of the latents.
    pub vae: Vae,
    /// Text encoder; without it, prompts cannot be encoded.
    pub text: Option<PromptEncoder>,
}

/// A Z-Image model.
pub struct ZImage {
    dit: Dit,
    vae: Vae,
    text: Option<PromptEncoder>,
    prompts: Prompts,
    schedule: ScheduleFacts,
    specs: Vec<ParameterSpec>,
    /// If set, it determines what recorded passes keep, instead of the transformer's settings.
    pub(crate) layout: Option<Layout>,
    /// If set, encodings can be cached.
    pub(crate) encoding_sources: Option<EncodingSources>,
    /// Location of the frozen weights.
    pub(crate) placement: Option<WeightPlacement>,
    /// The published network that the weights belong to.
    pub(crate) base: Option<BaseNetwork>,
}

/// Files and settings that encodings depend on.
pub(crate) struct EncodingSources {
    /// Files of VAE, text encoder and tokenizer.
    pub files: Vec<PathBuf>,
    /// A description of all settings that encodings depend on.
    pub settings: String,
}

impl ZImage {
    /// Combines the networks. `shift` is that of the noise levels of the model's own schedule.
    pub fn new(networks: Networks, shift: f64) -> Self {
        let Networks { dit, vae, text } = networks;
        let specs = dit.parameters().map(|parameters| parameters.specs().to_vec()).unwrap_or_default();
        Self {
            dit,
            vae,
            text,
            prompts: Prompts::default(),
            schedule: ScheduleFacts { shift, boundary: None, trained: SigmaRange::ALL },
            specs,
            layout: None,
            encoding_sources: None,
            placement: None,
            base: None,
        }
    }

    /// Shape of the latents of a picture, [C, 1, H, W]. Fails unless the model can represent its size.
    fn latent_shape(&self, frames: usize, [height, width]: [usize; 2]) -> Result<[usize; 4]> {
        if frames != 1 {
            return Err(Error::Unsupported(format!(
                "a video of {frames} frames: Z-Image makes pictures, which are videos of one frame (`data.num_frames: 1`)"
            )));
        }
        let unit = self.video_unit();
        if !unit.has_size([height, width]) {
            return Err(Error::Unsupported(format!(
                "a picture of {width}x{height} pixels: this model needs multiples of {}x{}",
                unit.width, unit.height
            )));
        }
        let (config, stride) = (self.vae.config(), self.vae.config().spatial_stride());
        Ok([config.latent_channels, 1, height / stride, width / stride])
    }

    /// What recorded passes of these inputs keep.
    fn pass_memory(&self, inputs: &[VelocityInput<'_>]) -> PassMemory {
        let default = self.dit.settings().kept;
        let (Some(layout), Some(first)) = (&self.layout, inputs.first()) else { return default };
        let &[_, _, height, width] = first.latents.shape() else { return default };
        let longest = inputs.iter().map(|input| input.conditioning.context.shape()[0]).max().unwrap_or(0);
        let tokens = tokens([height, width], longest);
        PassMemory {
            keeps_attention: layout.keeps_attention(self.parameter_count(), tokens, [height, width]),
            ..default
        }
    }
}

/// The text encoder. Fails if the model has none.
fn require_encoder(text: &Option<PromptEncoder>) -> Result<&PromptEncoder> {
    text.as_ref().ok_or_else(|| Error::Unsupported("prompts need the text encoder of the model".into()))
}

/// The unit of the sizes that a VAE of this size and the transformer can process.
pub(crate) fn picture_unit(vae: &VaeConfig) -> VideoUnit {
    let [_, height, width] = PATCH;
    let stride = vae.spatial_stride();
    VideoUnit { height: stride * height, width: stride * width, frames: 1, most_frames: Some(1) }
}

/// Number of tokens of a picture with latents of `[height, width]` and a caption of `caption` tokens, filled.
pub(crate) fn tokens([height, width]: [usize; 2], caption: usize) -> usize {
    let [_, rows, columns] = PATCH;
    let patches = height.div_ceil(rows) * width.div_ceil(columns);
    DitConfig::filled(patches) + DitConfig::filled(caption)
}

impl Model for ZImage {
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
        Distribution { weights: self.placement, token_ranks: 1 }
    }

    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        Some(self)
    }

    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        adapter_io::export(&self.dit, self.base.as_ref())
    }

    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        adapter_io::import(&self.dit, files)
    }
}

/// Fails unless a part without parameters has no values.
fn no_values(found: usize) -> Result<()> {
    match found {
        0 => Ok(()),
        _ => Err(Error::shape("part of the parameters", "[0]", &[found])),
    }
}

impl ParameterParts for ZImage {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        let Some(all) = self.dit.parameters() else { return no_values(out.len()) };
        all.read_part(which, out)
    }

    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()> {
        let Some(all) = self.dit.parameters() else { return no_values(values.len()) };
        all.write_part(which, values)
    }

    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        let Some(all) = self.dit.parameters() else { return no_values(add_into.len()) };
        all.take_gradients_part(which, add_into)
    }

    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        if let Some(parameters) = self.dit.parameters() {
            parameters.deliver_gradients(sink, 0, None);
        }
        true
    }

    fn device_updates(&self) -> Option<Box<dyn DeviceUpdates>> {
        Parameters::device_updates(self.dit.parameters())
    }
}

impl DiffusionModel for ZImage {
    fn schedule(&self) -> ScheduleFacts {
        self.schedule
    }

    fn video_unit(&self) -> VideoUnit {
        picture_unit(self.vae.config())
    }

    fn expect_prompts(&mut self, prompts: &[String]) {
        self.prompts.expect(prompts);
    }

    fn takes_image(&self) -> bool {
        false
    }

    fn check_input(&mut self, input: &ConditionInput) -> Result<()> {
        self.latent_shape(input.frames, input.size)?;
        require_encoder(&self.text).map(drop)
    }

    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning> {
        let latent_shape = self.latent_shape(input.frames, input.size)?;
        let text = require_encoder(&self.text)?;
        let context = self.prompts.features(&input.prompt, |batch| text.encode(batch))?;
        Ok(Conditioning { context, channels: None, image_tokens: None, first_frame: None, latent_shape })
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
        let kept = self.pass_memory(&[input]);
        self.dit.velocity_keeping(input, adapter, grad, kept)
    }

    fn velocities(
        &mut self,
        inputs: &[VelocityInput<'_>],
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.dit.velocities_keeping(inputs, adapter, grad, self.pass_memory(inputs))
    }

    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        self.vae.decode_clamped(latents, grad)
    }

    fn encoding_key(&self) -> Result<Option<String>> {
        let Some(EncodingSources { files, settings }) = &self.encoding_sources else { return Ok(None) };
        let key = Fingerprint::new("z_image").text("settings", settings);
        files.iter().try_fold(key, |key, file| key.file(file)).map(|key| Some(key.finish()))
    }

    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        Ok(self.vae.encode(frames, Grad::Skip)?.0)
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
