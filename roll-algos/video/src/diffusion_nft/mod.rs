//! DiffusionNFT (arXiv:2509.16117) and its relatives: reinforcement learning in the noising direction, for rewards
//! without a gradient.
//!
//! Per step: the old policy generates videos for each prompt by any sampler. They are scored, and advantages say how
//! much better each video is than other videos of its prompt. Then the velocity at noised copies of the videos, `x_t =
//! (1 - t) x_0 + t noise`, is regressed towards the velocity that leads to good videos and away from the velocity that
//! leads to bad videos ([`loss`]). At last the old policy follows the trained one a part of the way. Neither gradients
//! nor probabilities of trajectories are needed. The cost is two passes (three with `kl_weight`) and one pull per video
//! and noise level, whatever the sampler. The gradient of a differentiable reward can be added ([`RewardGradient`]).

pub mod config;
pub mod loss;

mod notes;
mod reward_gradient;
#[cfg(test)]
mod tests;

use roll_core::{
    Adapter, Grad, Kind, Model, Noise, Options, Purpose, Result, RewardScorer, ScheduleFacts, Sigma, StepContext,
    StepReport, Tensor, Timestep, VelocityInput, parse_options,
    plan::{Passes, Videos},
};
use roll_step::AlgorithmError;
use roll_step::stopwatch::{FORWARD, PULL, REFERENCE};
use roll_step::update::diffusion;

pub use config::{DiffusionNftConfig, Regression, RewardGradient};

use crate::draw_keys::in_unit_interval;
use crate::flow_matching::mixed;
use crate::kl_reference::KlReference;
use crate::policy_gradient::old_policy::with_parameters;
use crate::policy_gradient::round::{
    Group, NoExploration, Rollout, RoundOptions, RoundState, generate, key_of_update, require_different_videos,
    set_advantages,
};
use crate::policy_gradient::tally::Tally;
use crate::policy_gradient::{
    LossMask, Method, PolicyGradient, SharedOptions, TrainingState, clip::bounded, distance, shared_options,
};
use crate::sampling::Conditions;
use config::NftPlan;
use loss::awm::{self, AwmTerm};
use loss::{Noised, ValueAndGradient};
use reward_gradient::PredictionReward;

const NAME: &str = "diffusion_nft";

/// The algorithm `diffusion_nft`.
pub type DiffusionNft = PolicyGradient<DiffusionNftConfig>;

impl Method for DiffusionNftConfig {
    const NAME: &'static str = NAME;
    const HAS_OLD_POLICY: bool = true;

    fn shared(&self) -> SharedOptions {
        shared_options!(self, self.sampler)
    }

    fn check(&self, facts: ScheduleFacts, reward: &dyn RewardScorer) -> Result<()> {
        let NftPlan { sampling, steps, .. } = self.plan(facts)?;
        let levels: Vec<Sigma> = steps.iter().map(|i| sampling.schedule.sigma(*i)).collect();
        self.reward_gradient.check(&levels, reward)
    }

    fn round(&self, state: &mut TrainingState, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        require_different_videos(ctx, NAME)?;
        let (shared, plan) = (self.shared(), self.plan(diffusion(ctx.model, NAME)?.schedule())?);
        let mut round = RoundState::new(ctx);

        let old_parameters = state.old_policy.parameters(ctx.model)?.to_vec();
        let options = RoundOptions {
            algorithm: NAME,
            sampling: &plan.sampling,
            shared: &shared,
            has_same_start: false,
            share_prefix: false,
        };
        let prepared = &mut state.prepared;
        let mut groups = with_parameters(ctx, &old_parameters, |ctx| {
            generate(&options, prepared, ctx, &mut NoExploration, &mut round)
        })?;
        let is_finite = set_advantages(&shared, ctx, &mut groups, &mut round)?;
        state.train(&shared, ctx, &mut groups, is_finite, &mut round, |prepared, ctx, group, round| {
            let predictions = PredictionReward::of(self, prepared, ctx, group)?;
            self.accumulate(ctx, &plan, group, &old_parameters, predictions.as_ref(), round)
        })?;

        let decay = self.old_policy.at(ctx.step);
        state.old_policy.follow(ctx.model, decay)?;
        round.tally.add_to_mean("actor/old_policy_decay", decay);
        round.report(ctx, &shared)
    }
}

/// A noised copy of a video, and the velocities of other policies at it.
struct NoisedCopy<'a> {
    video: &'a Rollout,
    conditions: &'a Conditions,
    sigma: Sigma,
    /// The schedule's own timestep of the level `sigma`, because its rounded value decides which expert runs.
    timestep: Timestep,
    noise: Tensor,
    /// The noised latents x_t.
    x: Tensor,
    /// The velocity of the old policy; empty until `predict_by_old_and_reference` sets it.
    old: Tensor,
    /// The velocity of the KL's reference, if it is needed.
    reference: Option<Tensor>,
}

impl DiffusionNftConfig {
    /// Adds the gradient of one prompt's videos to the accumulators of the strategy. Videos without an advantage are
    /// left out, so that they cost nothing.
    fn accumulate(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &NftPlan,
        group: &Group<()>,
        old_parameters: &[f32],
        predictions: Option<&PredictionReward<'_>>,
        round: &mut RoundState<'_>,
    ) -> Result<()> {
        let mut copies = Vec::new();
        for video in group.trained() {
            copies.extend(self.noised_copies(ctx.noise, ctx.step, plan, group, video, round.update)?);
        }
        if copies.is_empty() || round.outcome.nonfinite.is_some() {
            return Ok(());
        }
        // Copies of high noise come first, so that experts that take turns on the device are changed once per pass.
        let boundary = diffusion(ctx.model, NAME)?.schedule().boundary;
        copies.sort_by_key(|copy| boundary.is_some_and(|boundary| copy.timestep.uses_low_noise(boundary)));
        round.begin(REFERENCE, "predicting by the old policy")?;
        self.predict_by_old_and_reference(ctx, old_parameters, &mut copies)?;
        for batch in copies.chunks(self.at_once) {
            round.begin(FORWARD, "predicting velocities")?;
            let inputs: Vec<VelocityInput<'_>> = batch.iter().map(NoisedCopy::input).collect();
            let (velocities, pullback) = diffusion(ctx.model, NAME)?.velocities(&inputs, Adapter::On, Grad::Record)?;
            let mut cotangents = Vec::new();
            for (copy, velocity) in batch.iter().zip(velocities.unstack()?) {
                let mut loss = self.loss_at(plan, copy, &velocity, &mut round.tally)?;
                if let Some(predictions) = predictions {
                    predictions.add(ctx, copy, &velocity, &mut loss, round)?;
                }
                round.tally.add_to_mean("actor/loss", loss.value);
                if !loss.value.is_finite() {
                    let what = format!("the loss at noise level {:.3}", copy.sigma.0);
                    round.outcome.nonfinite = Some((what, loss.value));
                    return Ok(());
                }
                let weight = group.weight / self.levels_per_video as f64;
                let cotangent = loss.gradient.iter().map(|d| (weight * d) as f32).collect::<Vec<f32>>();
                cotangents.push(Tensor::new(cotangent, velocity.shape())?);
            }
            round.begin(PULL, "pulling back")?;
            let pullback = pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
            ctx.strategy.before_last_pull(ctx.model)?;
            pullback.pull(&Tensor::stack(&cotangents)?)?;
            ctx.strategy.accumulate(ctx.model)?;
        }
        Ok(())
    }

    /// Sets the velocities of the old policy at `copies`, and those of the KL's reference if it is needed.
    fn predict_by_old_and_reference(
        &self,
        ctx: &mut StepContext<'_>,
        old_parameters: &[f32],
        copies: &mut [NoisedCopy<'_>],
    ) -> Result<()> {
        with_parameters(ctx, old_parameters, |ctx| {
            for batch in copies.chunks_mut(self.at_once) {
                let old = velocities(ctx.model, batch, Adapter::On)?;
                batch.iter_mut().zip(old).for_each(|(copy, v)| copy.old = v);
                if self.needs_reference() {
                    let references = velocities(ctx.model, batch, self.kl_reference.adapter())?;
                    batch.iter_mut().zip(references).for_each(|(copy, v)| copy.reference = Some(v));
                }
            }
            Ok(())
        })
    }

    /// The noised copies of one video in the update number `update`. They have `levels_per_video` noise levels, spread
    /// evenly over the levels of the sampler.
    fn noised_copies<'a>(
        &self,
        noise: &Noise,
        step: u64,
        plan: &NftPlan,
        group: &'a Group<()>,
        video: &'a Rollout,
        update: usize,
    ) -> Result<Vec<NoisedCopy<'a>>> {
        let (count, n) = (self.levels_per_video, video.latents.len());
        let key = key_of_update(video.key, update);
        let mut uniform = noise.uniform(Purpose::Levels, step, key);
        let noises = noise.normal(Purpose::Noising, step, key, &[count, n])?;
        let mut copies = Vec::new();
        for (i, noise_values) in noises.f32s()?.chunks_exact(n).enumerate() {
            // Stratified: one draw in each of `count` equal parts of [0, 1).
            let quantile = (i as f64 + in_unit_interval(uniform())) / count as f64;
            let index = (quantile * plan.steps.len() as f64) as usize;
            let position = plan.steps[index.min(plan.steps.len() - 1)];
            let sigma = plan.sampling.schedule.sigma(position);
            let timestep = plan.sampling.schedule.timestep(position);
            let x = group.conditions.prompt.with_first_frame(&mixed(&video.latents, noise_values, sigma)?)?;
            let noise = Tensor::new(noise_values.to_vec(), video.latents.shape())?;
            let old = Tensor::zeros([0]);
            let conditions = &group.conditions;
            copies.push(NoisedCopy { video, conditions, sigma, timestep, noise, x, old, reference: None });
        }
        Ok(copies)
    }

    /// The loss at a noised copy, and its gradient with respect to the velocity.
    fn loss_at(
        &self,
        plan: &NftPlan,
        copy: &NoisedCopy<'_>,
        velocity: &Tensor,
        tally: &mut Tally,
    ) -> Result<ValueAndGradient> {
        let noised = copy.at(velocity)?;
        let Noised { velocity: v, old, mask, .. } = noised;
        let advantage = bounded(copy.video.advantage, self.advantage_clip);
        let mut loss = match self.loss {
            Regression::Nft => plan.nft.at(advantage, &noised).loss,
            Regression::Awm => {
                let AwmTerm { term, gradient, .. } =
                    awm::at_level(self.matching, awm::GHUBER_POWER, advantage, plan.ratio_range, &noised);
                tally.add_to_mean("actor/ratio", term.ratio);
                tally.add_to_mean("actor/clip_fraction", f64::from(u8::from(plan.ratio_range.is_out(term.ratio))));
                ValueAndGradient { value: term.loss, gradient }
            }
        };
        tally.add_to_mean("actor/policy_loss", loss.value);
        let deviation = distance::squared(v, old, mask);
        tally.add_to_mean("actor/deviation", deviation);
        loss.value += self.old_kl_weight * deviation;
        distance::add_squared_gradient(&mut loss.gradient, self.old_kl_weight, v, old, mask);
        if let Some(reference) = &copy.reference {
            let reference = reference.f32s()?;
            let kl = distance::squared(v, reference, mask);
            tally.add_to_mean("actor/kl_loss", kl);
            loss.value += self.kl_weight * kl;
            distance::add_squared_gradient(&mut loss.gradient, self.kl_weight, v, reference, mask);
        }
        Ok(loss)
    }
}

impl NoisedCopy<'_> {
    fn input(&self) -> VelocityInput<'_> {
        let (latents, conditioning) = (&self.x, &self.conditions.prompt);
        VelocityInput { latents, timestep: self.timestep, conditioning }
    }

    /// The input of the losses: this copy, with the `velocity` of the policy in training at the copy.
    fn at<'b>(&'b self, velocity: &'b Tensor) -> Result<Noised<'b>> {
        // A given first frame is not generated, and so not part of the loss.
        let given_frames = usize::from(self.conditions.prompt.first_frame.is_some());
        let noised = Noised {
            data: self.video.latents.f32s()?,
            noise: self.noise.f32s()?,
            t: self.sigma.0,
            velocity: velocity.f32s()?,
            old: self.old.f32s()?,
            mask: LossMask::after(given_frames, velocity.shape())?,
        };
        noised.check()?;
        Ok(noised)
    }
}

/// The model's velocities at noised copies, without gradient.
fn velocities(model: &mut dyn Model, copies: &[NoisedCopy<'_>], adapter: Adapter) -> Result<Vec<Tensor>> {
    let inputs: Vec<VelocityInput<'_>> = copies.iter().map(NoisedCopy::input).collect();
    diffusion(model, NAME)?.velocities(&inputs, adapter, Grad::Skip)?.0.unstack()
}

roll_core::register! {
    Algorithm, NAME, DiffusionNftConfig,
    "Trains on scores without a gradient: regression towards the better of several videos (DiffusionNFT)",
    |options, _| Ok(DiffusionNft::new(options)),
    plan: passes,
}

/// The passes of the model for one prompt: its rollouts, and two passes per noised copy (three with `kl_weight`), one
/// of which is differentiated.
fn passes(options: &Options) -> Result<Passes> {
    let config: DiffusionNftConfig = parse_options(Kind::Algorithm.section(), options)?;
    let shared = config.shared();
    let (steps, velocities) = (shared.denoising_steps(), shared.velocities_per_step());
    let trained_videos = config.best_of.unwrap_or(config.group_size);
    let copies = trained_videos * config.levels_per_video * config.updates_per_step;
    // Passes by the old policy and, with `kl_weight`, by the KL's reference.
    let references = copies * (1 + usize::from(config.needs_reference()));
    let (forward, pulled) = (config.group_size * velocities * steps + copies, copies);
    let videos = Videos { count: config.group_size, at_once: config.at_once };
    let data_loss_passes = shared.data_loss_passes();
    // An upper bound, because copies above `reward_gradient.max_timestep_boundary` are not decoded.
    let predicted = if config.reward_gradient.weight > 0.0 { copies } else { 0 };
    Ok(Passes {
        forward: forward + data_loss_passes,
        pulled: pulled + data_loss_passes,
        steps: Some([steps, config.levels_per_video]),
        videos: Some(videos),
        references: Some(references),
        decoded: Some([config.group_size, predicted]),
        reference_is_start: config.kl_reference == KlReference::Start,
        ..Passes::default()
    })
}
