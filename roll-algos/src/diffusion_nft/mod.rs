//! DiffusionNFT (arXiv:2509.16117) and its relatives: reinforcement learning in the noising direction, for rewards
//! without a gradient.
//!
//! Per step: the old policy generates videos for each prompt by any sampler, they are scored, and advantages say how
//! much better each is than the others of its prompt. Then the velocity at noised copies of the videos, `x_t = (1 - t)
//! x_0 + t noise`, is regressed towards what would lead to the good ones and away from the bad ones ([`loss`]); at last
//! the old policy follows a part of the way. No trajectory is differentiated or has a probability: it costs three
//! passes and one pull per video and noise level, whatever the sampler. A reward that has a gradient may give it
//! besides ([`RewardGradient`]).

pub mod config;
pub mod loss;

mod notes;
mod reward_gradient;
#[cfg(test)]
mod tests;

use roll_core::{
    Adapter, Factory, Grad, Kind, Model, Noise, Options, Planner, Purpose, Registration, Result, RewardScorer,
    ScheduleFacts, Sigma, StepContext, StepReport, Tensor, VelocityInput, default_options, parse_options,
    plan::{Passes, Videos},
};

pub use config::{DiffusionNftConfig, Regression};
pub use reward_gradient::RewardGradient;

use crate::AlgorithmError;
use crate::flow_matching::mixed;
use crate::policy_gradient::round::{
    Group, Rollout, RoundOptions, Running, Unexplored, generate, judge, needs_different_videos,
};
use crate::policy_gradient::slow_copies::with_parameters;
use crate::policy_gradient::tally::Tally;
use crate::policy_gradient::{Counted, Kept, Method, PolicyGradient, Shared, distance};
use crate::sampling::Conditions;
use crate::stopwatch::{FORWARD, PULL, REFERENCE};
use crate::update::diffusion;
use config::Plan;
use loss::{Noised, Valued, awm};
use reward_gradient::Predictions;

const NAME: &str = "diffusion_nft";

/// The algorithm `diffusion_nft`.
pub type DiffusionNft = PolicyGradient<DiffusionNftConfig>;

impl Method for DiffusionNftConfig {
    const NAME: &'static str = NAME;
    const HAS_OLD_POLICY: bool = true;

    fn shared(&self) -> Shared {
        self.shared_options()
    }

    fn check(&self, facts: ScheduleFacts, reward: &dyn RewardScorer) -> Result<()> {
        self.reward_gradient.check(&self.plan(facts)?.levels, reward)
    }

    fn round(&self, kept: &mut Kept, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        needs_different_videos(ctx, NAME)?;
        let (shared, plan) = (self.shared(), self.plan(diffusion(ctx.model, NAME)?.schedule())?);
        let mut run = Running::new(ctx, &shared);

        let old = kept.copies.old(ctx.model)?.to_vec();
        let options = RoundOptions { algorithm: NAME, sampling: &plan.sampling, shared: &shared, same_start: false };
        let prepared = &mut kept.prepared;
        let mut groups = with_parameters(
            ctx,
            |c| &mut *c.model,
            &old,
            |ctx| generate(&options, prepared, ctx, &mut Unexplored, &mut run),
        )?;
        let is_finite = judge(&shared, ctx, &mut groups, &mut run.tally)?;
        kept.train(&shared, ctx, &mut groups, is_finite, &mut run, |prepared, ctx, group, run| {
            let predictions = Predictions::of(self, prepared, ctx, group)?;
            self.regress(ctx, &plan, group, &old, predictions.as_ref(), run)
        })?;

        let decay = self.old_policy.at(ctx.step);
        kept.copies.follow(ctx.model, decay)?;
        run.tally.mean("actor/old_policy_decay", decay);
        run.report(ctx)
    }
}

/// A noised copy of a video, and the predictions of other policies there.
struct Draw<'a> {
    video: &'a Rollout,
    conditions: &'a Conditions,
    sigma: Sigma,
    noise: Tensor,
    x: Tensor,
    old: Tensor,
    /// The velocity of the model without its adapter, if it is needed.
    reference: Option<Tensor>,
}

impl DiffusionNftConfig {
    /// Adds the gradient of one prompt's videos to the strategy. Videos without an advantage cost nothing.
    fn regress(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &Plan,
        group: &Group<()>,
        old: &[f32],
        predictions: Option<&Predictions<'_>>,
        run: &mut Running<'_>,
    ) -> Result<()> {
        let mut draws = Vec::new();
        for video in group.trained() {
            draws.extend(self.draws(ctx.noise, ctx.step, plan, group, video, run.update)?);
        }
        if draws.is_empty() || run.tally.nonfinite.is_some() {
            return Ok(());
        }
        run.begin(REFERENCE, "predicting by the old policy")?;
        with_parameters(
            ctx,
            |c| &mut *c.model,
            old,
            |ctx| {
                for draws in draws.chunks_mut(self.at_once) {
                    let found = velocities(ctx.model, draws, Adapter::On)?;
                    draws.iter_mut().zip(found).for_each(|(draw, old)| draw.old = old);
                    if self.kl_weight > 0.0 {
                        let found = velocities(ctx.model, draws, Adapter::Off)?;
                        draws.iter_mut().zip(found).for_each(|(draw, reference)| draw.reference = Some(reference));
                    }
                }
                Ok(())
            },
        )?;
        for draws in draws.chunks(self.at_once) {
            run.begin(FORWARD, "predicting velocities")?;
            let inputs: Vec<VelocityInput<'_>> = draws.iter().map(Draw::input).collect();
            let (found, pullback) = diffusion(ctx.model, NAME)?.velocities(&inputs, Adapter::On, Grad::Record)?;
            let mut cotangents = Vec::new();
            for (draw, velocity) in draws.iter().zip(found.unstack()?) {
                let mut valued = self.loss_at(plan, draw, &velocity, &mut run.tally)?;
                if let Some(predictions) = predictions {
                    predictions.add(ctx, draw, &velocity, &mut valued, run)?;
                }
                run.tally.mean("actor/loss", valued.value);
                if !valued.value.is_finite() {
                    run.tally.nonfinite = Some((format!("the loss at noise level {:.3}", draw.sigma.0), valued.value));
                    return Ok(());
                }
                let share = 1.0 / self.levels_per_video as f64;
                let cotangent = valued.gradient.iter().map(|d| (share * d) as f32).collect::<Vec<f32>>();
                cotangents.push(Tensor::new(cotangent, velocity.shape())?);
            }
            run.begin(PULL, "pulling back")?;
            let pullback = pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
            ctx.strategy.before_last_pull(ctx.model)?;
            pullback.pull(&Tensor::stack(&cotangents)?)?;
            ctx.strategy.accumulate(ctx.model)?;
        }
        Ok(())
    }

    /// The noised copies of one video in an update: at levels spread evenly over those of the sampler.
    fn draws<'a>(
        &self,
        noise: &Noise,
        step: u64,
        plan: &Plan,
        group: &'a Group<()>,
        video: &'a Rollout,
        update: usize,
    ) -> Result<Vec<Draw<'a>>> {
        let (count, n) = (self.levels_per_video, video.latents.len());
        let key = video.key_in(update);
        let mut uniform = noise.uniform(Purpose::Levels, step, key);
        let noises = noise.normal(Purpose::Noising, step, key, &[count, n])?;
        let mut draws = Vec::new();
        for (i, noise) in noises.f32s()?.chunks_exact(n).enumerate() {
            let quantile = (i as f64 + 0.5 * (f64::from(uniform()) + 1.0)) / count as f64;
            let place = (quantile * plan.levels.len() as f64) as usize;
            let sigma = plan.levels[place.min(plan.levels.len() - 1)];
            let x = group.conditions.prompt.with_first_frame(&mixed(&video.latents, noise, sigma)?)?;
            let noise = Tensor::new(noise.to_vec(), video.latents.shape())?;
            let old = Tensor::zeros([0]);
            draws.push(Draw { video, conditions: &group.conditions, sigma, noise, x, old, reference: None });
        }
        Ok(draws)
    }

    /// The loss at one draw, and its gradient in the velocity.
    fn loss_at(&self, plan: &Plan, draw: &Draw<'_>, velocity: &Tensor, tally: &mut Tally) -> Result<Valued> {
        let known = usize::from(draw.conditions.prompt.first_frame.is_some());
        let counted = Counted::after(known, velocity.shape())?;
        let (v, old) = (velocity.f32s()?, draw.old.f32s()?);
        let at = Noised {
            data: draw.video.latents.f32s()?,
            noise: draw.noise.f32s()?,
            t: draw.sigma.0,
            velocity: v,
            old,
            counted,
        };
        at.check()?;
        let advantage = draw.video.advantage.clamp(-self.advantage_clip, self.advantage_clip);
        let mut valued = match self.loss {
            Regression::Nft => plan.nft.at(advantage, &at).loss,
            Regression::Awm => {
                let (term, valued) = awm::at_level(self.matching, advantage, plan.clip, &at);
                tally.mean("actor/ratio", term.ratio);
                tally.mean("actor/clip_fraction", f64::from(u8::from(plan.clip.is_out(term.ratio))));
                valued
            }
        };
        tally.mean("actor/policy_loss", valued.value);
        let deviation = distance::squared(v, old, counted);
        tally.mean("actor/deviation", deviation);
        valued.value += self.old_kl_weight * deviation;
        distance::add_squared_gradient(&mut valued.gradient, self.old_kl_weight, v, old, counted);
        if let Some(reference) = &draw.reference {
            let reference = reference.f32s()?;
            let kl = distance::squared(v, reference, counted);
            tally.mean("actor/kl_loss", kl);
            valued.value += self.kl_weight * kl;
            distance::add_squared_gradient(&mut valued.gradient, self.kl_weight, v, reference, counted);
        }
        Ok(valued)
    }
}

impl Draw<'_> {
    fn input(&self) -> VelocityInput<'_> {
        let (latents, conditioning) = (&self.x, &self.conditions.prompt);
        VelocityInput { latents, timestep: self.sigma.timestep(), conditioning }
    }
}

/// Velocities without a gradient, one for each draw.
fn velocities(model: &mut dyn Model, draws: &[Draw<'_>], adapter: Adapter) -> Result<Vec<Tensor>> {
    let inputs: Vec<VelocityInput<'_>> = draws.iter().map(Draw::input).collect();
    diffusion(model, NAME)?.velocities(&inputs, adapter, Grad::Skip)?.0.unstack()
}

roll_core::inventory::submit! {
    Registration {
        name: NAME,
        summary: "Trains on scores without a gradient: regression towards the better of several videos (DiffusionNFT)",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<DiffusionNftConfig>,
        keys: roll_core::keys::of::<DiffusionNftConfig>,
        factory: Factory::Algorithm(|options, _| Ok(Box::new(DiffusionNft::new(parse_options("algo", options)?)))),
        planner: Some(Planner::Algorithm(passes)),
    }
}

/// The passes for one prompt: its rollouts, and three passes for each draw, one of which is differentiated.
fn passes(options: &Options) -> Result<Passes> {
    let config: DiffusionNftConfig = parse_options(Kind::Algorithm.section(), options)?;
    let shared = config.shared();
    let [steps, velocities] = shared.steps();
    let videos = config.best_of.unwrap_or(config.group_size);
    let draws = videos * config.levels_per_video * config.updates_per_step;
    let references = draws * if config.kl_weight > 0.0 { 2 } else { 1 };
    let (forward, pulled) = (config.group_size * velocities * steps + draws, draws);
    let videos = Videos { count: config.group_size, at_once: config.at_once, references };
    let on_clip = shared.on_clip();
    let steps = Some([steps, config.levels_per_video]);
    // At most: copies of high noise may be left out.
    let predicted = if config.reward_gradient.weight > 0.0 { draws } else { 0 };
    Ok(Passes {
        forward: forward + on_clip,
        pulled: pulled + on_clip,
        steps,
        videos: Some(videos),
        decoded: Some([config.group_size, predicted]),
        ..Passes::default()
    })
}
