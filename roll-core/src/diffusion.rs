//! Flow-matching video diffusion models.

use serde::{Deserialize, Serialize};

use crate::{Adapter, Error, Grad, Pullback, Result, Tensor, VideoUnit};

/// The timestep of pure noise.
const MAX_TIMESTEP: f64 = 1000.0;

/// Noise level on the model's own scale, 1000 * sigma: 1000 is pure noise, 0 is data.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct Timestep(#[serde(with = "crate::number")] pub f64);

impl Timestep {
    /// Whether the low-noise expert computes this timestep: whether it is below `boundary * 1000`.
    pub fn uses_low_noise(self, boundary: f64) -> bool {
        self.0 < boundary * MAX_TIMESTEP
    }
}

/// Noise level in [0, 1]: x_sigma = (1 - sigma) * data + sigma * noise.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct Sigma(#[serde(with = "crate::number")] pub f64);

impl Sigma {
    /// The timestep of this noise level.
    pub fn timestep(self) -> Timestep {
        Timestep(MAX_TIMESTEP * self.0)
    }
}

/// Noise levels from `low` to `high`, without `high` itself unless it is 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SigmaRange {
    /// The lowest level.
    pub low: Sigma,
    /// The upper end.
    pub high: Sigma,
}

impl SigmaRange {
    /// From data to pure noise.
    pub const ALL: Self = Self { low: Sigma(0.0), high: Sigma(1.0) };

    /// Whether `sigma` is within the range.
    pub fn contains(&self, sigma: Sigma) -> bool {
        sigma >= self.low && (sigma < self.high || (self.high >= Sigma(1.0) && sigma == self.high))
    }

    /// The intersection with `other`; `None` if it is empty.
    pub fn within(&self, other: Self) -> Option<Self> {
        let low = if other.low > self.low { other.low } else { self.low };
        let high = if other.high < self.high { other.high } else { self.high };
        (low < high).then_some(Self { low, high })
    }
}

/// Conditions of a video, as the user specifies them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ConditionInput {
    /// Text.
    pub prompt: String,
    /// First frame, f32 `[3, H, W]` in [-1, 1].
    pub image: Option<Tensor>,
    /// Last frame, f32 `[3, H, W]` in [-1, 1].
    pub end_image: Option<Tensor>,
    /// Frames to generate.
    pub frames: usize,
    /// Height and width in pixels.
    pub size: [usize; 2],
}

/// Conditions of a video, as the networks take them. They consist of tensors alone, which can be cached and sent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Conditioning {
    /// Text embedding, `[L, D]`, padded rows zero.
    pub context: Tensor,
    /// Channels concatenated to the latents, `[C, T, H, W]` in latent units (mask and image latents of I2V models).
    pub channels: Option<Tensor>,
    /// CLIP image tokens, `[L, D]` (Wan2.1 I2V).
    pub image_tokens: Option<Tensor>,
    /// The known first latent frame, `[C, 1, H, W]` (TI2V-5B), which replaces the first frame after each step.
    pub first_frame: Option<Tensor>,
    /// Shape of the latents, `[C, T, H, W]`.
    pub latent_shape: [usize; 4],
}

impl Conditioning {
    /// `latents` (`[C, T, H, W]`) with their first frame replaced by the known one, where there is one.
    pub fn with_first_frame(&self, latents: &Tensor) -> Result<Tensor> {
        let Some(known) = &self.first_frame else { return Ok(latents.clone()) };
        let [channels, frames, height, width] = *latents.shape() else {
            return Err(Error::shape("latents", "[C, T, H, W]", latents.shape()));
        };
        if known.shape() != [channels, 1, height, width] || frames == 0 {
            let expected = format!("[{channels}, 1, {height}, {width}]");
            return Err(Error::shape("the known first frame", expected, known.shape()));
        }
        let pixels = height * width;
        let mut values = latents.f32s()?.to_vec();
        for (channel, frame) in values.chunks_exact_mut(frames * pixels).zip(known.f32s()?.chunks_exact(pixels)) {
            channel[..pixels].copy_from_slice(frame);
        }
        Tensor::new(values, latents.shape())
    }
}

/// Facts of the checkpoint that a sampler needs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleFacts {
    /// Default shift of the sigma schedule.
    #[serde(with = "crate::number")]
    pub shift: f64,
    /// Timesteps at or above `boundary * 1000` use the high-noise expert; `None` with one expert.
    #[serde(default, with = "crate::number")]
    pub boundary: Option<f64>,
    /// The noise levels at which trainable parameters have an effect: the levels of the experts under training.
    #[serde(default = "all_levels")]
    pub trained: SigmaRange,
}

fn all_levels() -> SigmaRange {
    SigmaRange::ALL
}

/// The input of one velocity of [`DiffusionModel::velocities`].
#[derive(Clone, Copy, Debug)]
pub struct VelocityInput<'a> {
    /// f32 `[C, T, H, W]`.
    pub latents: &'a Tensor,
    /// Noise level of the latents.
    pub timestep: Timestep,
    /// Conditions of the video.
    pub conditioning: &'a Conditioning,
}

/// A video diffusion model that predicts the velocity d x / d sigma. Each method takes one sample, without a batch
/// axis; only [`DiffusionModel::velocities`] takes several.
pub trait DiffusionModel {
    /// Facts of the checkpoint.
    fn schedule(&self) -> ScheduleFacts;

    /// Sizes and lengths that [`DiffusionModel::encode`] takes. Data sets resize and cut their clips accordingly.
    fn video_unit(&self) -> VideoUnit {
        VideoUnit::default()
    }

    /// Announces the prompts of the next calls of [`DiffusionModel::encode`], in their order. A model that must read a
    /// large encoder for one prompt may then encode several at once. Each announcement replaces the previous one.
    fn expect_prompts(&mut self, prompts: &[String]) {
        let _ = prompts;
    }

    /// Whether [`DiffusionModel::encode`] uses [`ConditionInput::image`].
    fn takes_image(&self) -> bool {
        true
    }

    /// Fails as [`DiffusionModel::encode`] would on conditions that the model cannot take. Computes nothing.
    fn check_input(&mut self, input: &ConditionInput) -> Result<()> {
        let _ = input;
        Ok(())
    }

    /// Encodes prompt and pictures. Not differentiated.
    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning>;

    /// Velocity at `latents` (f32 `[C, T, H, W]`), same shape. The pullback returns the cotangent of the latents.
    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)>;

    /// Velocities at `inputs`, whose latents have one shape, stacked: f32 `[B, C, T, H, W]`. The pullback takes and
    /// returns cotangents of this shape.
    ///
    /// The default computes one velocity after the other. A model may compute them together; that is much faster for
    /// small models, and needs the memory of all passes at once.
    fn velocities(
        &mut self,
        inputs: &[VelocityInput<'_>],
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let (mut values, mut pullbacks) = (Vec::new(), Vec::new());
        for VelocityInput { latents, timestep, conditioning } in inputs {
            let (value, pullback) = self.velocity(latents, *timestep, conditioning, adapter, grad)?;
            values.push(value);
            pullbacks.extend(pullback);
        }
        let pull = move |cotangents: &Tensor| {
            let pulled: Result<Vec<Tensor>> =
                pullbacks.into_iter().zip(cotangents.unstack()?).map(|(pullback, d)| pullback.pull(&d)).collect();
            Tensor::stack(&pulled?)
        };
        Ok((Tensor::stack(&values)?, grad.is_on().then(|| Pullback::new(pull))))
    }

    /// Decodes latents (f32 `[C, T, H, W]`) to frames (f32 `[T', 3, H', W']`), clamped to [-1, 1]; the clamp has
    /// zero gradient outside. The pullback returns the cotangent of the latents.
    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)>;

    /// A cache key for [`DiffusionModel::encode`] and [`DiffusionModel::encode_video`]. It must change whenever their
    /// output for the same input may change, so derive it from the weights and settings of the networks they use.
    /// `Some` allows the caller to keep encodings beyond this run; `None` does not.
    fn encoding_key(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Frames per second of the videos that the checkpoint was trained on: at this rate, generated videos move
    /// naturally. `None` if the model does not know it.
    fn frame_rate(&self) -> Option<f64> {
        None
    }

    /// Encodes frames (f32 `[T', 3, H', W']` in [-1, 1]) to latents `[C, T, H, W]`. Not differentiated.
    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor>;
}
