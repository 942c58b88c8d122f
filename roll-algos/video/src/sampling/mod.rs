//! Generation of videos, and the parts that it shares with the rollouts of training: noise levels, samplers,
//! classifier-free guidance.

mod guidance;
mod options;
mod scale;

use std::ops::Range;

use crate::sampler::Integration;
use crate::{FlowSchedule, Sampler};
use roll_core::{Adapter, ConditionInput, Conditioning, DiffusionModel, Grad, Progress, Result, ResultExt, Tensor};

pub use guidance::{Conditions, Guidance, GuidanceGradient, Guided, GuidedPullback};
pub use options::SamplingOptions;
pub(crate) use options::check_steps_agree;
pub use scale::GuidanceScale;

/// The inputs of a video's generation.
pub struct Request<'a> {
    /// The encoded prompt and pictures.
    pub conditioning: &'a Conditioning,
    /// The prompt and pictures before they were encoded.
    pub input: ConditionInput,
    /// Negative prompt of classifier-free guidance.
    pub negative_prompt: &'a str,
    /// Noise, f32 `[C, T, H, W]`, in the conditioning's latent shape.
    pub noise: &'a Tensor,
    /// Whether to use the adapter or the base model.
    pub adapter: Adapter,
}

/// How a video is generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Noise levels of the steps.
    pub schedule: FlowSchedule,
    /// Sampler of the steps.
    pub sampler: Sampler,
    /// Classifier-free guidance of the velocities.
    pub guidance: Guidance,
}

impl Sampling {
    /// Generates the frames of a video, f32 `[T, 3, H, W]` in [-1, 1].
    pub fn frames(
        &self,
        model: &mut dyn DiffusionModel,
        request: Request<'_>,
        progress: &dyn Progress,
    ) -> Result<Tensor> {
        let Request { conditioning, input, negative_prompt, noise, adapter } = request;
        let negative = match self.guidance.is_on() {
            true => Some(negative_context(model, input, negative_prompt)?),
            false => None,
        };
        let latents = self.generate(model, &Conditions::new(conditioning, negative), noise, adapter, progress)?;
        progress.phase("decoding");
        Ok(model.decode(&latents, Grad::Skip)?.0)
    }

    /// Integrates the flow from `noise` (`[C, T, H, W]`) to data. The known first frame of TI2V models replaces the
    /// first frame of the latents before every step and at the end.
    pub fn generate(
        &self,
        model: &mut dyn DiffusionModel,
        conditions: &Conditions,
        noise: &Tensor,
        adapter: Adapter,
        progress: &dyn Progress,
    ) -> Result<Tensor> {
        let Self { schedule, sampler, guidance } = self;
        let mut x = conditions.prompt.with_first_frame(noise)?;
        let mut integration = sampler.start();
        for i in 0..schedule.steps() {
            progress.phase(&format!("denoising step {} of {}", i + 1, schedule.steps()));
            let v = guidance.velocity(model, &x, schedule.timestep(i), conditions, adapter, Grad::Skip)?.velocity;
            x = integration.step(schedule.sigma(i), schedule.sigma(i + 1), &x, &v)?;
            x = conditions.prompt.with_first_frame(&x)?;
        }
        Ok(x)
    }

    /// Begins to generate several videos as a batch. `starts` are their latents `[C, T, H, W]` before the next step.
    pub fn begin(&self, conditions: &Conditions, starts: &[Tensor]) -> Result<Batch> {
        let latents = starts.iter().map(|x| conditions.prompt.with_first_frame(x)).collect::<Result<_>>()?;
        Ok(Batch { latents, integrations: vec![self.sampler.start(); starts.len()] })
    }

    /// Does the steps in `range`, which begins where the previous call for `batch` ended. `step` may replace the
    /// sampler in a step (see [`OwnStep`]).
    pub fn advance(
        &self,
        model: &mut dyn DiffusionModel,
        conditions: &Conditions,
        batch: &mut Batch,
        range: Range<usize>,
        adapter: Adapter,
        step: &mut OwnStep<'_>,
    ) -> Result<()> {
        let Self { schedule, guidance, .. } = self;
        for i in range {
            let xs = &batch.latents;
            let guided = guidance.velocities(model, xs, schedule.timestep(i), conditions, adapter, Grad::Skip)?;
            let vs = guided.velocity.unstack()?;
            let next = match step(i, xs, &vs)? {
                Some(next) => next,
                None => {
                    let (from, to) = (schedule.sigma(i), schedule.sigma(i + 1));
                    let videos = batch.integrations.iter_mut().zip(xs.iter().zip(&vs));
                    videos.map(|(integration, (x, v))| integration.step(from, to, x, v)).collect::<Result<Vec<_>>>()?
                }
            };
            batch.latents = next.iter().map(|x| conditions.prompt.with_first_frame(x)).collect::<Result<_>>()?;
        }
        Ok(())
    }

    /// The steps of the high-noise expert and the steps of the low-noise expert. Without a `boundary` there is one
    /// expert, and all steps are in the second range.
    pub(crate) fn steps_of_experts(&self, boundary: Option<f64>) -> [Range<usize>; 2] {
        let steps = self.schedule.steps();
        let is_low = |i: &usize| boundary.is_none_or(|boundary| self.schedule.timestep(*i).uses_low_noise(boundary));
        let first_low = (0..steps).find(is_low).unwrap_or(steps);
        [0..first_low, first_low..steps]
    }
}

/// The state between two steps of videos that are generated as a batch.
pub struct Batch {
    /// The latents of each video, `[C, T, H, W]`.
    pub latents: Vec<Tensor>,
    /// The sampler's state of each video.
    integrations: Vec<Integration>,
}

/// A function that may replace the sampler in a step of a batch. Receives the index of the step, the latents before the
/// step, and their velocities. Returns the latents after the step, or `None` to leave the step to the sampler.
pub type OwnStep<'a> = dyn FnMut(usize, &[Tensor], &[Tensor]) -> Result<Option<Vec<Tensor>>> + 'a;

/// Computes the text embedding of a negative prompt. `input` is the input of any prompt, because the model may require
/// its pictures.
pub fn negative_context(
    model: &mut dyn DiffusionModel,
    input: ConditionInput,
    negative_prompt: &str,
) -> Result<Tensor> {
    let encoded = model.encode(&ConditionInput { prompt: negative_prompt.into(), ..input });
    Ok(encoded.while_doing(|| "encoding the negative prompt".into())?.context)
}
