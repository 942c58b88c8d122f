//! Evaluation: generates videos and scores them, without training.

use roll_core::{Error, Evaluated, EvaluationContext, Grad, Result, ResultExt, Sample, Tensor, Video};
use roll_step::update::diffusion;

use super::{FrameRate, Measured, Prepared, PreparedTarget, Reference};
use crate::reward_fl::{RolloutPlan, Trajectory, Unobserved, rollout};

/// How an evaluation generates videos, and the reference that they are compared with.
pub(crate) struct Generation<'a> {
    /// Name of the algorithm, for error messages.
    pub(crate) algorithm: &'static str,
    /// The negative prompt, which only guidance uses.
    pub(crate) negative_prompt: &'a str,
    pub(crate) reference: Reference,
    pub(crate) frame_rate: FrameRate,
    pub(crate) plan: &'a RolloutPlan,
}

/// Generates a video for every sample of the context and scores it. If a reward has nothing to score, its policy for
/// missing scores applies (`reward.on_missing`), as in training.
pub(crate) fn evaluate(
    generation: &Generation<'_>,
    prepared: &mut Prepared,
    ctx: &mut EvaluationContext<'_>,
) -> Result<Vec<Evaluated>> {
    let samples = ctx.samples;
    let count = samples.len();
    let evaluate_one = |(i, sample): (usize, &Sample)| {
        match count {
            1 => ctx.progress.phase("generating and scoring"),
            _ => ctx.progress.phase(&format!("evaluating clip {} of {count}", i + 1)),
        }
        if ctx.progress.interrupted() {
            return Err(Error::Interrupted);
        }
        evaluate_sample(generation, prepared, ctx, sample).while_doing(|| format!("evaluating {}", sample.origin))
    };
    let evaluated: Result<_> = samples.iter().enumerate().map(evaluate_one).collect();
    if evaluated.is_err() {
        prepared.high_noise_latents.clear();
    }
    evaluated
}

/// The key of a sample in [`Prepared::high_noise_latents`].
fn key(sample: &Sample) -> (u64, String) {
    (sample.index, sample.origin.clone())
}

/// Does the steps of the high-noise expert for `sample` and for the upcoming samples of the context, so that experts
/// that take turns on the device are changed once for all these samples. Returns the latents of `sample`.
fn begin_with_upcoming(
    generation: &Generation<'_>,
    prepared: &mut Prepared,
    ctx: &mut EvaluationContext<'_>,
    sample: &Sample,
    high_noise: &RolloutPlan,
) -> Result<Tensor> {
    for (i, next) in ctx.upcoming.iter().enumerate() {
        ctx.progress.phase(&format!("high noise: clip {} of {}", i + 1, ctx.upcoming.len() + 1));
        if ctx.progress.interrupted() {
            return Err(Error::Interrupted);
        }
        let trajectory = denoised(generation, prepared, ctx, next, high_noise, None);
        let latents = trajectory.while_doing(|| format!("evaluating {}", next.origin))?.latents;
        prepared.high_noise_latents.insert(key(next), latents);
    }
    Ok(denoised(generation, prepared, ctx, sample, high_noise, None)?.latents)
}

/// Runs the steps of `plan` for a sample, from `latents` or, without them, from noise.
fn denoised(
    Generation { algorithm, negative_prompt, .. }: &Generation<'_>,
    prepared: &mut Prepared,
    ctx: &mut EvaluationContext<'_>,
    sample: &Sample,
    plan: &RolloutPlan,
    latents: Option<Tensor>,
) -> Result<Trajectory> {
    let model = diffusion(ctx.model, algorithm)?;
    let conditions = prepared.conditions(model, sample, plan.guidance.is_on().then_some(negative_prompt))?;
    let noise = || ctx.noise.evaluation_latents(sample.index, &conditions.prompt.latent_shape);
    let start = latents.map_or_else(noise, Ok)?;
    rollout(model, &conditions, &start, plan, Grad::Skip, &mut Unobserved)
}

/// Generates the video of one sample and scores it by every reward of the context.
fn evaluate_sample(
    generation: &Generation<'_>,
    prepared: &mut Prepared,
    ctx: &mut EvaluationContext<'_>,
    sample: &Sample,
) -> Result<Evaluated> {
    let Generation { algorithm, reference, frame_rate, plan, .. } = generation;
    let boundary = diffusion(ctx.model, algorithm)?.schedule().boundary;
    // For every algorithm, the KL is the one of Reward-FL's rollout.
    let Trajectory { latents, kl, .. } = match plan.divided(boundary) {
        None => denoised(generation, prepared, ctx, sample, plan, None)?,
        Some([high_noise, low_noise]) => {
            let latents = match prepared.high_noise_latents.remove(&key(sample)) {
                Some(latents) => latents,
                None => begin_with_upcoming(generation, prepared, ctx, sample, &high_noise)?,
            };
            denoised(generation, prepared, ctx, sample, &low_noise, Some(latents))?
        }
    };
    let model = diffusion(ctx.model, algorithm)?;
    let (frames, _) = model.decode(&latents, Grad::Skip)?;
    let video = Video::new(frames, frame_rate.of(model, sample))?;
    let mut scores = Vec::new();
    for reward in ctx.rewards.iter_mut() {
        // An evaluation generates one video per prompt, so a reward that compares videos has no score.
        if reward.compares() {
            scores.push(None);
            continue;
        }
        let target = PreparedTarget::new(&mut **reward, sample, *reference)?;
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
