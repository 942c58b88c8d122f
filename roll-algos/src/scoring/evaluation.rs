//! Generates and scores videos without training.

use roll_core::{Error, Evaluated, EvaluationContext, Grad, Model, Result, ResultExt, Sample, Tensor, Video};

use super::{FrameRate, Measured, Prepared, PreparedTarget, Reference, reference_video};
use crate::sampling::Conditions;
use crate::update::diffusion;

/// How an evaluation generates videos, and what they are compared with.
pub(crate) struct Generation<'a> {
    /// Name of the algorithm, for error messages.
    pub(crate) algorithm: &'static str,
    /// The negative prompt, if guidance is used.
    pub(crate) negative_prompt: Option<&'a str>,
    pub(crate) reference: Reference,
    pub(crate) frame_rate: FrameRate,
    /// Computes latents from noise, and the KL divergence from the model without its adapter.
    pub(crate) generate: &'a Generate<'a>,
}

type Generate<'a> = dyn Fn(&mut dyn Model, &Conditions, &Tensor) -> Result<(Tensor, f64)> + 'a;

/// Generates a video for every sample of the context and scores it. If a reward has nothing to score, its policy
/// applies, as in training.
pub(crate) fn evaluate(
    generation: &Generation<'_>,
    prepared: &mut Prepared,
    ctx: &mut EvaluationContext<'_>,
) -> Result<Vec<Evaluated>> {
    let samples = ctx.samples;
    let count = samples.len();
    let one = |(i, sample): (usize, &Sample)| {
        match count {
            1 => ctx.progress.phase("generating and scoring"),
            _ => ctx.progress.phase(&format!("evaluating clip {} of {count}", i + 1)),
        }
        if ctx.progress.interrupted() {
            return Err(Error::Interrupted);
        }
        evaluate_sample(generation, prepared, ctx, sample).while_doing(|| format!("evaluating {}", sample.origin))
    };
    samples.iter().enumerate().map(one).collect()
}

fn evaluate_sample(
    generation: &Generation<'_>,
    prepared: &mut Prepared,
    ctx: &mut EvaluationContext<'_>,
    sample: &Sample,
) -> Result<Evaluated> {
    let Generation { algorithm, negative_prompt, reference, frame_rate, generate } = generation;
    let conditions = prepared.conditions(diffusion(ctx.model, algorithm)?, sample, *negative_prompt)?;
    let noise = ctx.noise.evaluation_latents(sample.index, &conditions.prompt.latent_shape)?;
    let (latents, kl) = generate(ctx.model, &conditions, &noise)?;
    let model = diffusion(ctx.model, algorithm)?;
    let (frames, _) = model.decode(&latents, Grad::Skip)?;
    let video = Video::new(frames, frame_rate.of(model, sample))?;
    let reference = reference_video(sample, *reference)?;
    let mut scores = Vec::new();
    for reward in ctx.rewards.iter_mut() {
        let target = PreparedTarget::new(&mut **reward, &reference)?;
        scores.push(match Measured::of(&video, sample, &target, &mut **reward, Grad::Skip)? {
            Measured::Score { value, .. } => Some(value),
            Measured::Skipped(reason) => {
                let (sample, reward) = (&sample.origin, reward.name());
                tracing::warn!(sample, reward, reason, "the sample has no score");
                None
            }
        });
    }
    Ok(Evaluated { origin: sample.origin.clone(), scores, kl, video: Some(video) })
}
