//! Reward-FL: trains a video diffusion model by back-propagating a reward through the decoder and the last denoising
//! steps.
//!
//! Per sample: a rollout from noise whose last steps are recorded ([`trajectory`]), frames = decode(latents), score =
//! reward(frames), loss = -(score - mean) / std * weight + kl_weight * kl ([`loss`]), and the discrete adjoint back to
//! the parameters. The gradients of the samples that had a score are averaged into one update.

pub mod config;
pub mod loss;
pub mod trajectory;

mod evaluation;
mod prepared;
#[cfg(test)]
mod ranks_tests;
mod report;
mod split;
#[cfg(test)]
mod tests;
mod watch;

use std::sync::Arc;

use roll_core::plan::Passes;
use roll_core::registry::{default_options, parse_options};
use roll_core::{
    Algorithm, DiffusionModel, Evaluated, EvaluationContext, Factory, Grad, Headline, HeadlineFormat, Kind, Model,
    OnMissing, Options, Planner, Pullback, Registration, Result, ResultExt, RewardScorer, Sample, Score, StepContext,
    StepReport, Tensor, Video,
};

pub use crate::update::OnNonfinite;
pub use config::{Config, EarlyStop, LatentDtype, Reference};
pub use loss::Loss;
pub use trajectory::{Observer, Phase, Plan, Trajectory, Unobserved, rollout};

use crate::remembered::Remembered;
use crate::{AlgorithmError, update};
use prepared::{Prepared, REMEMBERED_BYTES};
use report::{Outcome, SCORE, Scored, Tally};
use split::Split;
use watch::Watch;

const NAME: &str = "reward_fl";

/// The algorithm `reward_fl`.
pub struct RewardFl {
    config: Config,
    prepared: Remembered<Prepared>,
}

impl RewardFl {
    /// With these options.
    pub fn new(config: Config) -> Self {
        Self { config, prepared: Remembered::new(REMEMBERED_BYTES) }
    }
}

impl Algorithm for RewardFl {
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let facts = diffusion(model)?.schedule();
        if model.parameter_count() == 0 {
            return Err(AlgorithmError::NothingToTrain.into());
        }
        let reward = reward.ok_or(AlgorithmError::NoReward { algorithm: NAME })?;
        if !reward.differentiable() {
            return Err(AlgorithmError::NotDifferentiable { algorithm: NAME, reward: reward.name().into() }.into());
        }
        self.config.plan(facts).map(drop)
    }

    fn headlines(&self) -> Vec<Headline> {
        vec![
            Headline::new(SCORE, "score", "Score").score(),
            Headline::new("actor/kl_loss", "kl", "KL to the base model").written(HeadlineFormat::Scientific),
            Headline::new("actor/loss", "loss", "Loss"),
            Headline::new("actor/grad_norm", "grad norm", "Gradient norm").written(HeadlineFormat::Scientific),
        ]
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let report = self.update(context);
        if report.is_err() {
            // Whoever catches the error finds no half-summed gradient.
            update::forget(context)?;
        }
        report
    }

    fn evaluate(&mut self, context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        evaluation::evaluate(&self.config, context).map(Some)
    }
}

impl RewardFl {
    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let plan = self.config.plan(diffusion(ctx.model)?.schedule())?;
        let every = self.config.gradient_split_every;
        let mut split = (every > 0 && ctx.step.is_multiple_of(every)).then(|| Split::new(ctx.model.parameter_count()));
        let mut watch = Watch::new(ctx.progress);
        let mut tally = Tally::default();
        ctx.strategy.discard();

        for sample in ctx.samples {
            let outcome = self
                .sample(ctx, sample, &plan, split.as_mut(), &mut watch, &mut tally)
                .while_doing(|| format!("training on {}", sample.origin))?;
            tally.add(sample, outcome);
            if tally.nonfinite.is_some() {
                break;
            }
        }

        watch.begin(Phase::Optimizer)?;
        let (scored, mut nonfinite, mut norms) = (tally.scored(), tally.nonfinite.take(), None);
        let update = update::finish(ctx, scored, &mut nonfinite, self.config.on_nonfinite, |ranks, scored| {
            norms = split.map(|split| split.norms(ranks, scored)).transpose()?;
            Ok(())
        })?;
        (tally.nonfinite, tally.split) = (nonfinite, norms);
        let ranks = ctx.strategy.communicator();
        let seconds = update::slowest(ranks, watch.seconds())?;
        let alias = ctx.reward.as_deref().and_then(|reward| reward.measures().alias);
        Ok(tally.joined(ranks)?.report(update, ctx.learning_rate, alias, seconds))
    }

    /// Adds the gradient of one sample's loss to the strategy.
    fn sample(
        &mut self,
        ctx: &mut StepContext<'_>,
        sample: &Sample,
        plan: &Plan,
        split: Option<&mut Split>,
        watch: &mut Watch<'_>,
        tally: &mut Tally,
    ) -> Result<Outcome> {
        watch.begin(Phase::Encode)?;
        let prepared = self.prepare(ctx, sample)?;
        let Prepared { conditioning, target } = &*prepared;
        let noise = ctx.noise.latents(ctx.step, sample.index, &conditioning.latent_shape)?;

        let kl_alone = match split {
            Some(_) => {
                let trajectory = rollout(diffusion(ctx.model)?, conditioning, &noise, plan, Grad::Record, watch)?;
                trajectory.pull(None, self.config.kl_weight, watch)?;
                Some(update::taken(ctx.model)?)
            }
            None => None,
        };

        let trajectory = rollout(diffusion(ctx.model)?, conditioning, &noise, plan, Grad::Record, watch)?;

        watch.begin(Phase::Decode)?;
        let (frames, decode) = diffusion(ctx.model)?.decode(&trajectory.latents, Grad::Record)?;
        let video = Video::new(frames, sample.video.fps())?;
        tally.see(&video);
        if ctx.want_videos {
            tally.videos.push((format!("sample-{:06}", sample.index), video.clone()));
        }

        watch.begin(Phase::Score)?;
        let reward = ctx.reward.as_deref_mut().ok_or(AlgorithmError::NoReward { algorithm: NAME })?;
        let (score, details, pull_score) = match reward.score(&video, &sample.prompt, target, Grad::Record)? {
            (Score::Value { value, details }, pullback) => {
                let pullback = pullback.ok_or_else(|| trajectory::no_pullback(format!("`{}`", reward.name())))?;
                (value, details, Some(pullback))
            }
            (Score::Missing { reason }, _) => match reward.on_missing() {
                OnMissing::Skip => return Ok(Outcome::Skipped(reason)),
                OnMissing::Value(value) => (value, Default::default(), None),
                OnMissing::Error => {
                    let (sample, reward) = (sample.origin.clone(), reward.name().to_string());
                    return Err(AlgorithmError::NothingToScore { sample, reward, reason }.into());
                }
            },
        };
        let loss = Loss::at(score, trajectory.kl, &self.config);
        for (what, value) in [("the score", score), ("the KL", trajectory.kl), ("the loss", loss.value)] {
            if !value.is_finite() {
                return Ok(Outcome::NonFinite(format!("{what} of {}", sample.origin), value));
            }
        }
        let scored = Scored { loss: loss.value, score, kl: trajectory.kl, details };

        watch.begin(Phase::PullReward)?;
        let d_latents = match pull_score.filter(|_| loss.d_score != 0.0) {
            Some(pull_score) => Some(pull_frames(pull_score, decode, loss.d_score)?),
            None => None,
        };
        match (split, kl_alone) {
            (Some(split), Some(kl_alone)) => {
                trajectory.pull(d_latents.as_ref(), loss.d_kl, watch)?;
                split.accumulate(ctx.strategy, ctx.model, &kl_alone)?;
            }
            _ => {
                let (strategy, model) = (&mut *ctx.strategy, &mut *ctx.model);
                let before_last = || strategy.before_last_pull(model);
                trajectory.pull_telling(d_latents.as_ref(), loss.d_kl, watch, before_last)?;
                ctx.strategy.accumulate(ctx.model)?;
            }
        }
        Ok(Outcome::Scored(scored))
    }

    /// What depends on the sample alone; computed once while the cache has room.
    fn prepare(&mut self, ctx: &mut StepContext<'_>, sample: &Sample) -> Result<Arc<Prepared>> {
        if let Some(prepared) = self.prepared.get(sample) {
            return Ok(prepared);
        }
        let reward = ctx.reward.as_deref_mut().ok_or(AlgorithmError::NoReward { algorithm: NAME })?;
        let prepared = Prepared::new(diffusion(ctx.model)?, reward, sample, self.config.reference)?;
        Ok(self.prepared.insert(sample, prepared))
    }
}

/// From the slope of the loss in the score to the cotangent of the latents.
fn pull_frames(score: Pullback, decode: Option<Pullback>, d_score: f64) -> Result<Tensor> {
    let d_frames = score.pull(&Tensor::scalar(d_score as f32))?;
    decode.ok_or_else(|| trajectory::no_pullback("the decoder".into()))?.pull(&d_frames)
}

fn diffusion(model: &mut dyn Model) -> Result<&mut dyn DiffusionModel> {
    update::diffusion(model, NAME)
}

roll_core::inventory::submit! {
    Registration {
        name: NAME,
        summary: "Back-propagates a reward of the decoded video through the last denoising steps",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<Config>,
        factory: Factory::Algorithm(|options, _| Ok(Box::new(RewardFl::new(parse_options("algo", options)?)))),
        planner: Some(Planner::Algorithm(passes)),
    }
}

fn passes(options: &Options) -> Result<Passes> {
    let config: Config = parse_options(Kind::Algorithm.section(), options)?;
    let forward = config.final_timestep + 1;
    Ok(Passes { forward, pulled: forward.saturating_sub(config.mid_timestep) })
}
