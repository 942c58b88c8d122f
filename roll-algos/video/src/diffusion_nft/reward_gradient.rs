//! The gradient of the reward in addition to the regression, on the same noised copies of the same videos.
//!
//! The velocity v at a copy `x_t` points at a video, `x_0 = x_t - t v`. The video is decoded and scored, and `-weight *
//! score` is added to the loss of the copy. Reward-FL does the same with `trained_steps: {renoised: N}`. Here the
//! regression computes and pulls back the velocities anyway, so the additional cost is a decoding, a score, and their
//! pulls.

use std::sync::Arc;

use roll_core::{Error, Grad, Result, RewardScorer, Sample, Sigma, StepContext, Tensor, Video};
use roll_step::stopwatch::{DECODE, PULL, SCORING};
use roll_step::update::{diffusion, reward};

use super::loss::ValueAndGradient;
use super::{DiffusionNftConfig, NAME, NoisedCopy, RewardGradient};
use crate::arithmetic::axpy;
use crate::policy_gradient::LossMask;
use crate::policy_gradient::round::{Group, RoundState};
use crate::scoring::{FrameRate, Measured, Prepared, PreparedTarget, pull_frames};

impl RewardGradient {
    /// Fails if `max_timestep_boundary` is below all trained `levels` (descending), or if the reward has no gradient.
    /// Passes if the weight is 0.
    pub(super) fn check(&self, levels: &[Sigma], reward: &dyn RewardScorer) -> Result<()> {
        let invalid = |key: &str, problem: String| Err(Error::config(format!("algo.reward_gradient.{key}"), problem));
        if self.weight == 0.0 {
            return Ok(());
        }
        if !levels.iter().any(|level| self.acts_at(*level)) {
            let highest = levels.first().map_or(0.0, |level| level.0);
            let lowest = levels.last().map_or(0.0, |level| level.0);
            let found = self.max_timestep_boundary;
            let problem = format!("no noise level that is trained, {lowest:.3} to {highest:.3}, is at most {found}");
            return invalid("max_timestep_boundary", problem);
        }
        if !reward.differentiable() {
            let name = reward.name();
            let problem = format!("the reward `{name}` has no gradient: leave it at 0, or choose another reward");
            return invalid("weight", problem);
        }
        Ok(())
    }

    /// Whether copies at this noise level are scored.
    fn acts_at(&self, level: Sigma) -> bool {
        level.0 <= self.max_timestep_boundary
    }
}

/// The reward term of one prompt: scores of the videos that velocities at noised copies point at.
pub(super) struct PredictionReward<'a> {
    options: RewardGradient,
    sample: &'a Sample,
    target: Arc<PreparedTarget>,
    frame_rate: FrameRate,
}

impl<'a> PredictionReward<'a> {
    /// The term for the videos of a group; `None` if the reward's gradient is not used.
    pub(super) fn of(
        config: &DiffusionNftConfig,
        prepared: &mut Prepared,
        ctx: &mut StepContext<'a>,
        group: &Group<()>,
    ) -> Result<Option<Self>> {
        if config.reward_gradient.weight == 0.0 {
            return Ok(None);
        }
        let sample = &ctx.samples[group.position];
        let target = prepared.target(reward(ctx, NAME)?, sample, config.reference)?;
        Ok(Some(Self { options: config.reward_gradient, sample, target, frame_rate: config.frame_rate }))
    }

    /// Adds `-weight * score` of the video that `velocity` points at to the loss of a copy, and the term's gradient
    /// with respect to `velocity` to the loss's gradient. A predicted video without a score adds nothing.
    pub(super) fn add(
        &self,
        ctx: &mut StepContext<'_>,
        copy: &NoisedCopy<'_>,
        velocity: &Tensor,
        loss: &mut ValueAndGradient,
        round: &mut RoundState<'_>,
    ) -> Result<()> {
        if !self.options.acts_at(copy.sigma) {
            return Ok(());
        }
        let (prompt, t) = (&copy.conditions.prompt, copy.sigma.0);
        let data = prompt.with_first_frame(&axpy(&copy.x, -(t as f32), velocity)?)?;
        round.begin(DECODE, "decoding a prediction")?;
        let model = diffusion(ctx.model, NAME)?;
        let (frames, decode_pullback) = model.decode(&data, Grad::Record)?;
        let video = Video::new(frames, self.frame_rate.of(model, self.sample))?;
        round.begin(SCORING, "scoring a prediction")?;
        let measured = Measured::of(&video, self.sample, &self.target, reward(ctx, NAME)?, Grad::Record)?;
        let is_missing = matches!(measured, Measured::Skipped(_));
        round.tally.add_to_mean("actor/prediction_unscored", f64::from(u8::from(is_missing)));
        let Measured::Score { value, pullback, .. } = measured else { return Ok(()) };
        round.tally.add_to_mean("actor/prediction_score", value);
        loss.value -= self.options.weight * value;
        // Without a pullback, the score is the constant of `reward.on_missing`.
        let Some(pullback) = pullback else { return Ok(()) };
        round.begin(PULL, "pulling back through reward and decoder")?;
        let d_data = pull_frames(pullback, decode_pullback, -self.options.weight)?;
        let d_data = d_data.f32s()?;
        // d x_0 / d v is -t, except in a known first frame, where it is 0.
        let mask = LossMask::after(usize::from(prompt.first_frame.is_some()), velocity.shape())?;
        mask.positions().for_each(|i| loss.gradient[i] -= t * f64::from(d_data[i]));
        Ok(())
    }
}
