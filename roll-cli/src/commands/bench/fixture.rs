//! The networks of a preset with random weights, made on the device, and the inputs of a step.

use burn_tensor::Device;
use roll_backends::strategy::{SingleOptions, Zero, single};
use roll_core::{
    Conditioning, DiffusionModel, Error, Model, Noise, OptimizerConfig, Purpose, Result, Strategy, Tensor, Timestep,
};

use super::preset::Preset;
use super::scorer::Scorer;

/// The timestep of every pass. The value does not change the time of a pass.
const TIMESTEP: Timestep = Timestep(500.0);

/// The model, reward, strategy and inputs of a measured step.
pub struct Fixture {
    /// One transformer with a LoRA, and the VAE.
    pub model: Box<dyn Model>,
    pub scorer: Scorer,
    pub strategy: Zero,
    /// The latents that are denoised and decoded, `[C, T, H, W]`.
    pub latents: Tensor,
    pub conditioning: Conditioning,
    /// The video that is encoded, `[T, 3, H, W]` in [-1, 1].
    pub video: Tensor,
    pub timestep: Timestep,
}

impl Fixture {
    /// Makes the networks of the preset on `device`. All inputs are random.
    pub fn new(preset: &Preset<'_>, device: &Device) -> Result<Self> {
        let facts = preset.facts();
        let noise = Noise::new(0);
        let mut model = preset.networks.model(device, preset.vae_dtype)?;
        // Each `index` has a draw of its own.
        let normal = |index: u64, shape: &[usize]| noise.normal(Purpose::Synthetic, 0, index, shape);
        let latent_shape = facts.latent_shape;
        let [_, t, h, w] = latent_shape;
        let channels = match facts.more_channels {
            0 => None,
            extra => Some(normal(1, &[extra, t, h, w])?),
        };
        let [height, width] = facts.size;
        let pixels = normal(2, &[facts.frames, 3, height, width])?;
        let video =
            Tensor::new(pixels.f32s()?.iter().map(|v| v.clamp(-1.0, 1.0)).collect::<Vec<f32>>(), pixels.shape())?;
        let mut strategy = single(SingleOptions::default());
        strategy.attach(&mut *model, &OptimizerConfig::default())?;
        Ok(Self {
            model,
            scorer: Scorer::new(device),
            strategy,
            latents: normal(3, &latent_shape)?,
            conditioning: Conditioning {
                context: normal(4, &facts.context)?,
                channels,
                image_tokens: None,
                first_frame: None,
                latent_shape,
            },
            video,
            timestep: TIMESTEP,
        })
    }
    /// The model as passes see it.
    pub fn diffusion(&mut self) -> Result<&mut dyn DiffusionModel> {
        as_diffusion(&mut *self.model)
    }
}

/// `model` as passes see it.
pub fn as_diffusion(model: &mut dyn Model) -> Result<&mut dyn DiffusionModel> {
    model.as_diffusion().ok_or_else(|| Error::Misuse("the preset is not of a diffusion model".into()))
}
