//! Generating and scoring without training.

use roll_core::{Evaluated, EvaluationContext, Grad, Result, ResultExt, Sample, Score, Video};

use super::config::RewardFlConfig;
use super::plan::Plan;
use super::trajectory::{Unobserved, rollout};
use super::{diffusion, prepared};

/// Runs the trajectory of training, without gradient, for every sample of the context.
pub(super) fn evaluate(config: &RewardFlConfig, ctx: &mut EvaluationContext<'_>) -> Result<Vec<Evaluated>> {
    let plan = config.plan(diffusion(ctx.model)?.schedule())?;
    let samples = ctx.samples;
    let count = samples.len();
    let one = |(i, sample): (usize, &Sample)| {
        ctx.progress.phase(&format!("evaluating clip {} of {count}", i + 1));
        if ctx.progress.interrupted() {
            return Err(roll_core::Error::Interrupted);
        }
        sample_of(config, ctx, &plan, sample).while_doing(|| format!("evaluating {}", sample.origin))
    };
    samples.iter().enumerate().map(one).collect()
}

fn sample_of(
    config: &RewardFlConfig,
    ctx: &mut EvaluationContext<'_>,
    plan: &Plan,
    sample: &Sample,
) -> Result<Evaluated> {
    let model = diffusion(ctx.model)?;
    let conditioning = prepared::conditioning(model, sample)?;
    let noise = ctx.noise.evaluation_latents(sample.index, &conditioning.latent_shape)?;
    let trajectory = rollout(model, &conditioning, &noise, plan, Grad::Skip, &mut Unobserved)?;
    let (frames, _) = model.decode(&trajectory.latents, Grad::Skip)?;
    let video = Video::new(frames, sample.video.fps())?;
    let reference = prepared::reference_video(sample, config.reference)?;
    let mut scores = Vec::new();
    for reward in ctx.rewards.iter_mut() {
        let target = reward.prepare(&reference)?;
        scores.push(match reward.score(&video, &sample.prompt, &target, Grad::Skip)?.0 {
            Score::Value { value, .. } => Some(value),
            Score::Missing { .. } => None,
        });
    }
    Ok(Evaluated { origin: sample.origin.clone(), scores, kl: trajectory.kl, video: Some(video) })
}
