//! Generating and scoring without training.

use roll_core::{Evaluated, EvaluationContext, Grad, Result, ResultExt, Sample, Video};

use super::config::RewardFlConfig;
use super::diffusion;
use super::measure::Measured;
use super::plan::Plan;
use super::prepared::{Prepared, Prospect, reference_video};
use super::trajectory::{Unobserved, rollout};

/// Runs the trajectory of training, without gradient and by the sampler of evaluations, for every sample of the context.
/// Where a reward has nothing to score, its policy decides, as in training.
pub(super) fn evaluate(
    config: &RewardFlConfig,
    prepared: &mut Prepared,
    ctx: &mut EvaluationContext<'_>,
) -> Result<Vec<Evaluated>> {
    let plan = config.evaluation_plan(diffusion(ctx.model)?.schedule())?;
    let samples = ctx.samples;
    let count = samples.len();
    let one = |(i, sample): (usize, &Sample)| {
        match count {
            1 => ctx.progress.phase("generating and scoring"),
            _ => ctx.progress.phase(&format!("evaluating clip {} of {count}", i + 1)),
        }
        if ctx.progress.interrupted() {
            return Err(roll_core::Error::Interrupted);
        }
        sample_of(config, prepared, ctx, &plan, sample).while_doing(|| format!("evaluating {}", sample.origin))
    };
    samples.iter().enumerate().map(one).collect()
}

fn sample_of(
    config: &RewardFlConfig,
    prepared: &mut Prepared,
    ctx: &mut EvaluationContext<'_>,
    plan: &Plan,
    sample: &Sample,
) -> Result<Evaluated> {
    let model = diffusion(ctx.model)?;
    let negative = plan.guidance.is_on().then_some(config.negative_prompt.as_str());
    let conditions = prepared.conditions(model, sample, negative)?;
    let noise = ctx.noise.evaluation_latents(sample.index, &conditions.prompt.latent_shape)?;
    let trajectory = rollout(model, &conditions, &noise, plan, Grad::Skip, &mut Unobserved)?;
    let (frames, _) = model.decode(&trajectory.latents, Grad::Skip)?;
    let video = Video::new(frames, config.fps(model, sample))?;
    let reference = reference_video(sample, config.reference)?;
    let mut scores = Vec::new();
    for reward in ctx.rewards.iter_mut() {
        let prospect = Prospect::new(&mut **reward, &reference)?;
        scores.push(match Measured::of(&video, sample, &prospect, &mut **reward, Grad::Skip)? {
            Measured::Score { value, .. } => Some(value),
            Measured::Skipped(reason) => {
                let (sample, reward) = (&sample.origin, reward.name());
                tracing::warn!(sample, reward, reason, "the sample has no score");
                None
            }
        });
    }
    Ok(Evaluated { origin: sample.origin.clone(), scores, kl: trajectory.kl, video: Some(video) })
}
