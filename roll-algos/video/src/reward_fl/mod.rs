//! Reward-FL trains a video diffusion model by back-propagating a reward through the decoder and the last denoising
//! steps, or through steps that [`truncation`] selects.
//!
//! For each sample: a rollout from noise whose last steps are recorded ([`trajectory`]), frames = decode(latents),
//! score = reward(frames), loss = -(score - mean) / std * weight + kl_weight * kl ([`loss`]), and the discrete adjoint
//! back to the parameters. A flow-matching loss on the sample's clip may be added to prevent forgetting. The gradients
//! of all samples with a score are averaged into one update.

pub mod config;
pub mod direct;
pub mod leap;
pub mod loss;
pub mod plan;
pub mod trajectory;
pub mod truncation;

#[cfg(test)]
mod adjoint_tests;
mod experts;
#[cfg(test)]
mod guidance_tests;
mod notes;
#[cfg(test)]
mod ranks_tests;
mod report;
mod split;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod truncation_tests;

use std::sync::Arc;

use roll_core::{
    Algorithm, ClipAlgorithm, ClipUse, DiffusionModel, Evaluated, EvaluationContext, Grad, Headline, Kind, Model,
    Options, Result, ResultExt, RewardScorer, Sample, Samples, StepContext, StepReport, Tensor, Video, parse_options,
    plan::Passes,
};
use roll_step::ranks::Bits;
use roll_step::stopwatch::{DATA, DECODE, ENCODE, OPTIMIZER, PULL, REFERENCE, ROLLOUT, SCORING, Stopwatch};
use roll_step::{AlgorithmError, update};

pub use roll_step::update::OnNonfinite;

pub use crate::scoring::{FrameRate, Reference, reference_video};
pub use config::{Direct, RewardFlConfig, TrainedSteps};
pub use direct::DirectStep;
pub use leap::Leap;
pub use loss::Loss;
pub use plan::{Adjoint, EarlyStop, RolloutPlan};
pub use trajectory::{Observer, Trajectory, Unobserved, rollout};

use crate::VideoError;
use crate::draw_keys::{draw_key, repeats};
use crate::flow_matching::DataTerm;
use crate::kl_reference::KlReference;
use crate::report::{StepOutcome, headlines};
use crate::sampling::{Conditions, GuidanceGradient};
use crate::scoring::{self, Generation, Measured, Prepared, PreparedTarget, pull_frames};
use report::{Outcome, Scored, Tally};
use split::GradientSplit;
use truncation::StepCounts;

const NAME: &str = "reward_fl";
/// The phases whose times a training step reports.
const PHASES: [&str; 8] = [ENCODE, ROLLOUT, REFERENCE, DECODE, SCORING, PULL, DATA, OPTIMIZER];

/// The initial latents and the plan of a scored video.
struct RolloutStart {
    plan: RolloutPlan,
    /// Latents `[C, T, H, W]` at the noise level of the plan's first step.
    latents: Tensor,
    /// The step with known noise, with `trained_steps: {direct: ..}`.
    direct: Option<DirectStep>,
}

/// The algorithm `reward_fl`.
pub struct RewardFl {
    config: RewardFlConfig,
    prepared: Prepared,
    /// The flow-matching loss on the samples' own clips.
    data: DataTerm,
}

impl RewardFl {
    /// Creates the algorithm.
    pub fn new(config: RewardFlConfig) -> Self {
        let data = DataTerm::new(config.data_weight, config.shift);
        Self { config, prepared: Prepared::default(), data }
    }
}

impl Algorithm for RewardFl {
    fn samples(self: Box<Self>) -> Samples {
        Samples::Clips(self)
    }

    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let facts = diffusion(model)?.schedule();
        update::check_trainable(model)?;
        let reward = reward.ok_or(AlgorithmError::NoReward { algorithm: NAME })?;
        if !reward.differentiable() || reward.compares() {
            return Err(VideoError::NotDifferentiable { algorithm: NAME, reward: reward.name().into() }.into());
        }
        self.config.evaluation_plan(facts)?;
        self.config.check_experts(facts)?.iter().for_each(|warning| tracing::warn!("{warning}"));
        self.config.chosen_steps(facts)?.iter().for_each(|steps| tracing::info!("{steps}"));
        self.data.check(facts)
    }

    fn headlines(&self) -> Vec<Headline> {
        headlines()
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        update::discard_on_error(context, |context| self.update(context))
    }
}

impl ClipAlgorithm for RewardFl {
    fn clip_use(&self) -> ClipUse {
        ClipUse { why_needed: self.data.reason_for_clips(), reference: self.config.reference }
    }

    fn evaluate(&mut self, context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        let config = &self.config;
        let plan = config.evaluation_plan(diffusion(context.model)?.schedule())?;
        let generation = Generation {
            algorithm: NAME,
            negative_prompt: &config.negative_prompt,
            reference: config.reference,
            frame_rate: config.frame_rate,
            plan: &plan,
        };
        scoring::evaluate(&generation, &mut self.prepared, context).map(Some)
    }
}

/// The state of a training step, which its samples share.
struct StepState<'a> {
    plan: RolloutPlan,
    /// Present in steps that measure the gradients of reward and KL separately.
    split: Option<GradientSplit>,
    watch: Stopwatch<'a>,
    tally: Tally,
    outcome: StepOutcome,
}

/// The videos of one sample, whose losses are averaged.
struct SampleVideos<'a> {
    sample: &'a Sample,
    /// How often the sample already occurred in the same training step.
    repeats: u64,
    /// Key of the sample's draws.
    key: u64,
    target: Arc<PreparedTarget>,
    conditions: Conditions,
    starts: Vec<RolloutStart>,
    /// Factor of the gradient of each video: the sample's weight divided by the number of videos.
    share: f64,
}

impl RewardFl {
    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let measures_gradients_apart = self.config.measures_gradients_apart(ctx.step, ctx.model.parameter_count());
        let mut state = StepState {
            plan: self.config.plan(diffusion(ctx.model)?.schedule())?,
            split: measures_gradients_apart.then(|| GradientSplit::new(ctx.model.parameter_count())),
            watch: Stopwatch::new(ctx.progress, &PHASES),
            tally: Tally::default(),
            outcome: StepOutcome::default(),
        };
        ctx.strategy.discard();

        // All samples pass through the frozen high-noise expert before the first one enters the low-noise expert, so
        // that experts that take turns on the device are changed once.
        let mut videos_by_sample = Vec::new();
        let all_repeats = repeats(ctx.strategy.ranks().data.as_ref(), ctx.samples)?;
        for (sample, repeats) in ctx.samples.iter().zip(all_repeats) {
            let videos = self.begin_sample(ctx, sample, repeats, &mut state);
            match videos.while_doing(|| format!("training on {}", sample.origin))? {
                Ok(videos) => videos_by_sample.push(videos),
                Err(reason) => state.outcome.skip(sample, reason),
            }
        }
        for videos in videos_by_sample {
            let finished = self.finish_sample(ctx, &videos, &mut state);
            match finished.while_doing(|| format!("training on {}", videos.sample.origin))? {
                Outcome::Scored(scored) => state.tally.scored.push(scored),
                Outcome::Skipped(reason) => state.outcome.skip(videos.sample, reason),
                Outcome::NonFinite(what, value) => {
                    state.outcome.nonfinite = Some((what, value));
                    break;
                }
            }
        }

        let StepState { split, mut watch, tally, mut outcome, .. } = state;
        watch.begin(OPTIMIZER, Some("updating parameters"))?;
        let (own_samples, on_nonfinite, mut norms) = (tally.total_fraction(), self.config.on_nonfinite, None);
        // The norms are measured just before the update.
        let update = update::finish(ctx, own_samples, &mut outcome.nonfinite, on_nonfinite, |ranks, all_samples| {
            norms = split.map(|split| split.norms(ranks, all_samples)).transpose()?;
            Ok(())
        })?;
        let mut metrics = tally.joined(ctx.strategy.ranks().data.as_ref())?.metrics();
        if let Some((reward, kl)) = norms {
            metrics.insert("actor/grad_norm_reward".into(), reward);
            metrics.insert("actor/grad_norm_kl".into(), kl);
        }
        outcome.report(ctx, watch, update.as_slice(), metrics)
    }

    /// Encodes a sample and does the steps of a frozen high-noise expert for its videos. Returns the reason as the
    /// inner error if the sample is skipped. `repeats` counts earlier occurrences of the sample in the same training
    /// step.
    fn begin_sample<'a>(
        &mut self,
        ctx: &mut StepContext<'_>,
        sample: &'a Sample,
        repeats: u64,
        state: &mut StepState<'_>,
    ) -> Result<Result<SampleVideos<'a>, String>> {
        state.watch.begin(ENCODE, Some("encoding prompt and reference"))?;
        let target = self.prepared.target(reward(ctx)?, sample, self.config.reference)?;
        // A sample that is skipped in any case costs no rollout.
        if let PreparedTarget::Missing(reason) = &*target
            && let Measured::Skipped(reason) = Measured::missing(sample, reward(ctx)?, reason.clone())?
        {
            return Ok(Err(reason));
        }
        let key = draw_key(sample, repeats);
        let (conditions, mut starts) = self.starts(ctx, sample, key, state)?;
        let model = diffusion(ctx.model)?;
        let boundary = model.schedule().boundary;
        for RolloutStart { plan, latents, .. } in &mut starts {
            if let Some([high_noise, low_noise]) = plan.divided(boundary) {
                *latents = rollout(model, &conditions, latents, &high_noise, Grad::Skip, &mut state.watch)?.latents;
                *plan = low_noise;
            }
        }
        let share = sample.weight / starts.len() as f64;
        Ok(Ok(SampleVideos { sample, repeats, key, target, conditions, starts, share }))
    }

    /// Generates and scores the videos of one sample, and adds the gradient of its loss to the strategy.
    fn finish_sample(
        &mut self,
        ctx: &mut StepContext<'_>,
        videos: &SampleVideos<'_>,
        state: &mut StepState<'_>,
    ) -> Result<Outcome> {
        let (mut scored_videos, mut scored_starts, mut missing_reason) = (Vec::new(), Vec::new(), String::new());
        for (i, start) in videos.starts.iter().enumerate() {
            // A measurement of the separate gradients pulls again afterwards.
            let is_last_pull = i + 1 == videos.starts.len() && state.split.is_none();
            match self.train_on_video(ctx, videos, i, is_last_pull, state)? {
                Outcome::Scored(video) => {
                    scored_videos.push(video);
                    scored_starts.push(start);
                }
                Outcome::Skipped(reason) => missing_reason = reason,
                nonfinite => return Ok(nonfinite),
            }
        }
        // Without a score for any video, nothing was pulled back and all recordings are freed.
        let Some(scored) = Scored::mean(scored_videos, videos.starts.len()) else {
            return Ok(Outcome::Skipped(missing_reason));
        };
        match &mut state.split {
            Some(split) => {
                let total = update::take_gradients(ctx.model)?;
                let kl_alone = self.kl_gradient(ctx, videos, &scored_starts, &mut state.watch)?;
                split.accumulate(ctx.strategy, ctx.model, total, &kl_alone)?;
            }
            None => ctx.strategy.accumulate(ctx.model)?,
        }
        self.with_data_term(ctx, videos, scored, &mut state.watch)
    }

    /// The conditions of a sample's videos, and the starts of their recorded rollouts.
    fn starts(
        &mut self,
        ctx: &mut StepContext<'_>,
        sample: &Sample,
        key: u64,
        state: &mut StepState<'_>,
    ) -> Result<(Conditions, Vec<RolloutStart>)> {
        let StepState { plan, watch, .. } = state;
        let negative = plan.guidance.is_on().then_some(self.config.negative_prompt.as_str());
        let conditions = self.prepared.conditions(diffusion(ctx.model)?, sample, negative)?;
        let noise = ctx.noise.latents(ctx.step, key, &conditions.prompt.latent_shape)?;
        let unrecorded_latents = |plan: &RolloutPlan, noise: &Tensor| -> Result<Tensor> {
            Ok(rollout(diffusion(ctx.model)?, &conditions, noise, plan, Grad::Skip, watch)?.latents)
        };
        let starts = self.config.trained_steps.starts(plan, noise, ctx.noise, [ctx.step, key], unrecorded_latents)?;
        Ok((conditions, starts))
    }

    /// Computes the gradient of the weighted KL alone, for the videos that begin at `starts`, and takes it from the
    /// model. Repeats the rollouts of these videos.
    fn kl_gradient(
        &self,
        ctx: &mut StepContext<'_>,
        videos: &SampleVideos<'_>,
        starts: &[&RolloutStart],
        watch: &mut Stopwatch<'_>,
    ) -> Result<Vec<f32>> {
        for RolloutStart { plan, latents, .. } in starts {
            let trajectory = rollout(diffusion(ctx.model)?, &videos.conditions, latents, plan, Grad::Record, watch)?;
            trajectory.pull(None, videos.share * self.config.kl_weight, watch)?;
        }
        update::take_gradients(ctx.model)
    }

    /// Computes video `number` of a sample, its score and its loss, and pulls the loss back to the parameters.
    /// `is_last_pull` says whether this is the last pull before the strategy takes the gradient.
    fn train_on_video(
        &self,
        ctx: &mut StepContext<'_>,
        videos: &SampleVideos<'_>,
        number: usize,
        is_last_pull: bool,
        state: &mut StepState<'_>,
    ) -> Result<Outcome> {
        let StepState { watch, tally, outcome, .. } = state;
        let SampleVideos { sample, repeats, target, conditions, share, .. } = videos;
        let RolloutStart { plan, latents, direct } = &videos.starts[number];
        let mut trajectory = rollout(diffusion(ctx.model)?, conditions, latents, plan, Grad::Record, watch)?;
        if let Some(step) = direct {
            trajectory = step.finished(trajectory, &conditions.prompt)?;
        }

        watch.begin(DECODE, Some("decoding"))?;
        let (frames, decode) = diffusion(ctx.model)?.decode(&trajectory.latents, Grad::Record)?;
        let video = Video::new(frames, self.config.frame_rate.of(diffusion(ctx.model)?, sample))?;
        tally.count_video(&video);
        if ctx.want_videos && number == 0 {
            outcome.show(sample, *repeats, video.clone());
        }

        watch.begin(SCORING, Some("scoring"))?;
        let measured = match direct {
            Some(step) => step.measured(&video, sample, target, reward(ctx)?)?,
            None => Measured::of(&video, sample, target, reward(ctx)?, Grad::Record)?,
        };
        let (score, details, pull_score) = match measured {
            Measured::Score { value, details, pullback } => (value, details, pullback),
            Measured::Skipped(reason) => return Ok(Outcome::Skipped(reason)),
        };
        let loss = Loss::at(score, trajectory.kl, trajectory.similarity, &self.config);
        for (what, value) in [("the score", score), ("the KL", trajectory.kl), ("the loss", loss.value)] {
            if !value.is_finite() {
                return Ok(Outcome::NonFinite(format!("{what} of {}", sample.origin), value));
            }
        }
        let details = details.into_iter().map(|(name, value)| (name, Bits(value))).collect();
        let kl = plan.reference.map(|_| trajectory.kl);
        // A video counts whole; `Scored::mean` sets the fraction of the sample.
        let scored = Scored { fraction: 1.0, loss: loss.value, score, kl, data_loss: None, details };

        watch.begin(PULL, Some("pulling back through reward and decoder"))?;
        // A score that the loss does not depend on is not pulled back, and its recording is freed here.
        let d_latents = match pull_score.filter(|_| loss.d_score != 0.0) {
            Some(pull_score) => Some(pull_frames(pull_score, decode, share * loss.d_score)?),
            None => None,
        };
        let (strategy, model) = (&mut *ctx.strategy, &mut *ctx.model);
        let before_last = || if is_last_pull { strategy.before_last_pull(model) } else { Ok(()) };
        trajectory.pull_with(d_latents.as_ref(), share * loss.d_kl, watch, before_last)?;
        Ok(Outcome::Scored(scored))
    }

    /// Adds the flow-matching loss on the sample's clip to `scored`, and the gradient of this loss to the strategy.
    fn with_data_term(
        &mut self,
        ctx: &mut StepContext<'_>,
        &SampleVideos { sample, key, .. }: &SampleVideos<'_>,
        mut scored: Scored,
        watch: &mut Stopwatch<'_>,
    ) -> Result<Outcome> {
        if self.data.is_on() {
            watch.begin(DATA, Some("training on the clip"))?;
            scored.data_loss = self.data.accumulate(ctx, sample, key, scored.fraction * sample.weight)?;
            let data_loss = scored.data_loss.unwrap_or(0.0);
            if !data_loss.is_finite() {
                return Ok(Outcome::NonFinite(format!("the loss on the clip of {}", sample.origin), data_loss));
            }
            scored.loss += self.data.weight() * data_loss;
        }
        Ok(Outcome::Scored(scored))
    }
}

/// The reward of the training step.
fn reward<'a>(ctx: &'a mut StepContext<'_>) -> Result<&'a mut dyn RewardScorer> {
    update::reward(ctx, NAME)
}

fn diffusion(model: &mut dyn Model) -> Result<&mut dyn DiffusionModel> {
    update::diffusion(model, NAME)
}

roll_core::register! {
    Algorithm, NAME, RewardFlConfig,
    "Back-propagates a reward of the decoded video through the last denoising steps",
    |options, _| Ok(RewardFl::new(options)),
    plan: passes,
}

/// The passes of the model for one sample: its rollout, the recorded steps, and the loss on its clip.
fn passes(options: &Options) -> Result<Passes> {
    let config: RewardFlConfig = parse_options(Kind::Algorithm.section(), options)?;
    config.check_steps()?;
    let window = config.final_timestep + 1 - config.mid_timestep;
    let StepCounts { trained, beside_rollout } = config.trained_steps.counts(window);
    let steps = config.final_timestep + 1 + beside_rollout;
    // The loss on the clip computes one velocity, without guidance.
    let data_loss_passes = usize::from(config.data_weight > 0.0);
    let (velocities, recorded) = match (config.guidance_scale.is_on(), config.guidance_gradient) {
        (false, _) => (1, 1),
        (true, GuidanceGradient::Conditional) => (2, 1),
        (true, GuidanceGradient::Both) => (2, 2),
    };
    let (forward, pulled) = (velocities * steps + data_loss_passes, recorded * trained + data_loss_passes);
    // The videos of a sample are processed one after another, followed by its clip.
    let videos = config.trained_steps.videos();
    let reference_is_start = config.kl_reference == KlReference::Start;
    let held = Some(recorded * trained / videos);
    // Every decoding is pulled back.
    let decoded = Some([0, videos]);
    let references = Some(if config.kl_weight > 0.0 { trained } else { 0 });
    Ok(Passes {
        forward,
        pulled,
        steps: Some([steps, trained]),
        held,
        decoded,
        references,
        reference_is_start,
        ..Passes::default()
    })
}
