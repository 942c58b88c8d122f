//! DiffusionNFT (arXiv:2509.16117) and its relatives: reinforcement learning in the noising direction, for rewards
//! without a gradient.
//!
//! Per step: the old policy generates videos for each prompt by any sampler, they are scored, and advantages say how
//! much better each is than the others of its prompt. Then the velocity at noised copies of the videos, `x_t = (1 - t)
//! x_0 + t noise`, is regressed towards what would lead to the good ones and away from the bad ones ([`loss`]); at last
//! the old policy follows a part of the way. No trajectory is differentiated or has a probability: it costs three
//! passes and one pull per video and noise level, whatever the sampler.

pub mod config;
pub mod loss;

mod notes;
#[cfg(test)]
mod tests;

use roll_core::plan::{Passes, Videos};
use roll_core::registry::{default_options, parse_options};
use roll_core::{
    Adapter, Algorithm, Evaluated, EvaluationContext, Factory, Grad, Headline, Kind, Model, Noise, Options, Planner,
    Purpose, Registration, Result, RewardScorer, Sigma, StateDict, StepContext, StepReport, Tensor, VelocityInput,
};

pub use config::{DiffusionNftConfig, Regression};

use crate::flow_matching::mixed;
use crate::policy_gradient::levels::generate_measured;
use crate::policy_gradient::round::{
    FORWARD, Group, OPTIMIZER, PHASES, PULL, REFERENCE, Rollout, RoundOptions, Unexplored, generate, judge,
    needs_different_videos,
};
use crate::policy_gradient::slow_copies::{SlowCopies, with_parameters};
use crate::policy_gradient::tally::{Tally, headlines};
use crate::policy_gradient::{Counted, distance};
use crate::sampling::Conditions;
use crate::scoring::{self, Generation, Prepared};
use crate::stopwatch::Stopwatch;
use crate::update::diffusion;
use crate::{AlgorithmError, update};
use config::Plan;
use loss::{Noised, Valued, awm, awr, rvm};

const NAME: &str = "diffusion_nft";

/// The algorithm `diffusion_nft`.
pub struct DiffusionNft {
    config: DiffusionNftConfig,
    prepared: Prepared,
    copies: SlowCopies,
    /// Updates that were made.
    updates: u64,
}

impl DiffusionNft {
    /// With these options.
    pub fn new(config: DiffusionNftConfig) -> Self {
        Self { config, prepared: Prepared::default(), copies: SlowCopies::default(), updates: 0 }
    }
}

impl Algorithm for DiffusionNft {
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let facts = diffusion(model, NAME)?.schedule();
        if model.parameter_count() == 0 {
            return Err(AlgorithmError::NothingToTrain.into());
        }
        reward.ok_or(AlgorithmError::NoReward { algorithm: NAME })?;
        self.config.plan(facts)?;
        self.copies.begin(model, true, self.config.evaluation_average > 0.0)
    }

    fn headlines(&self) -> Vec<Headline> {
        headlines()
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let report = self.round(context);
        if report.is_err() {
            // No half-summed gradient is left for the next step.
            update::forget(context)?;
        }
        report
    }

    fn evaluate(&mut self, context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        let config = &self.config;
        let sampling = config.evaluation(diffusion(context.model, NAME)?.schedule())?;
        let generation = Generation {
            algorithm: NAME,
            negative_prompt: sampling.guidance.is_on().then_some(config.negative_prompt.as_str()),
            reference: config.reference,
            frame_rate: config.frame_rate,
            generate: &|model, conditions, noise| generate_measured(model, NAME, &sampling, conditions, noise),
        };
        let prepared = &mut self.prepared;
        let evaluated = match self.copies.evaluated(context.model)? {
            None => scoring::evaluate(&generation, prepared, context),
            Some(average) => with_parameters(
                context,
                |c| &mut *c.model,
                average,
                |context| scoring::evaluate(&generation, prepared, context),
            ),
        };
        evaluated.map(Some)
    }

    fn state(&self) -> serde_json::Value {
        serde_json::json!({ "updates": self.updates })
    }

    fn load_state(&mut self, state: &serde_json::Value) -> Result<()> {
        self.updates = state["updates"].as_u64().unwrap_or(0);
        Ok(())
    }

    fn tensors(&self) -> Result<StateDict> {
        self.copies.state()
    }

    fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
        self.copies.load(tensors)
    }
}

/// A noised copy of a video, and what other policies predict there.
struct Draw<'a> {
    video: &'a Rollout,
    conditions: &'a Conditions,
    sigma: Sigma,
    noise: Tensor,
    x: Tensor,
    old: Tensor,
    /// Of the model without its adapter, where it matters.
    reference: Option<Tensor>,
}

impl DiffusionNft {
    fn round(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        needs_different_videos(ctx, NAME)?;
        let plan = self.config.plan(diffusion(ctx.model, NAME)?.schedule())?;
        let mut watch = Stopwatch::new(ctx.progress, &PHASES);
        let mut tally = Tally::default();
        ctx.strategy.discard();

        let old = self.copies.old(ctx.model)?.to_vec();
        let options = RoundOptions {
            algorithm: NAME,
            sampling: &plan.sampling,
            group_size: self.config.group_size,
            at_once: self.config.at_once,
            same_start: false,
            negative_prompt: &self.config.negative_prompt,
            reference: self.config.reference,
            frame_rate: self.config.frame_rate,
        };
        let prepared = &mut self.prepared;
        let mut groups = with_parameters(
            ctx,
            |c| &mut *c.model,
            &old,
            |ctx| generate(&options, prepared, ctx, &mut Unexplored, &mut watch, &mut tally),
        )?;
        let is_finite = judge(self.config.judgement(), ctx, &mut groups, &mut tally)?;

        let updates = if is_finite { self.config.updates_per_step } else { 1 };
        for number in 0..updates {
            if is_finite {
                for group in &groups {
                    self.regress(ctx, &plan, group, &old, number, &mut watch, &mut tally)?;
                }
            }
            watch.begin_after_update(OPTIMIZER, Some("updating parameters"));
            let (trained, mut nonfinite) = (tally.trained, tally.nonfinite.take());
            let update = update::finish(ctx, trained, &mut nonfinite, self.config.on_nonfinite, |_, _| Ok(()))?;
            tally.nonfinite = nonfinite;
            self.updates += u64::from(update.as_ref().is_some_and(|update| update.applied));
            tally.updates.extend(update);
            self.copies.average(ctx.model, self.updates, self.config.evaluation_average)?;
        }
        let decay = self.config.old_policy.at(ctx.step);
        self.copies.follow(ctx.model, decay)?;
        tally.mean("actor/old_policy_decay", decay);

        let ranks = ctx.strategy.communicator();
        let seconds = update::slowest(ranks, watch.seconds())?;
        let alias = ctx.reward.as_deref().and_then(|reward| reward.measures().alias);
        Ok(tally.joined(ranks)?.report(ctx.learning_rate, alias, seconds))
    }

    /// Adds the gradient of one prompt's videos to the strategy. Videos without an advantage cost nothing.
    #[allow(clippy::too_many_arguments)] // a round, and one group of it
    fn regress(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &Plan,
        group: &Group<()>,
        old: &[f32],
        update: usize,
        watch: &mut Stopwatch<'_>,
        tally: &mut Tally,
    ) -> Result<()> {
        let trained = group.videos.iter().filter(|video| video.advantage != 0.0);
        let mut draws = Vec::new();
        for video in trained {
            draws.extend(self.draws(ctx.noise, ctx.step, plan, group, video, update)?);
        }
        if draws.is_empty() || tally.nonfinite.is_some() {
            return Ok(());
        }
        begin(watch, update, REFERENCE, "predicting by the old policy")?;
        let at_once = self.config.at_once;
        with_parameters(
            ctx,
            |c| &mut *c.model,
            old,
            |ctx| {
                for draws in draws.chunks_mut(at_once) {
                    let found = velocities(ctx.model, draws, Adapter::On)?;
                    draws.iter_mut().zip(found).for_each(|(draw, old)| draw.old = old);
                    if self.config.kl_weight > 0.0 {
                        let found = velocities(ctx.model, draws, Adapter::Off)?;
                        draws.iter_mut().zip(found).for_each(|(draw, reference)| draw.reference = Some(reference));
                    }
                }
                Ok(())
            },
        )?;
        for draws in draws.chunks(at_once) {
            begin(watch, update, FORWARD, "predicting velocities")?;
            let inputs: Vec<VelocityInput<'_>> = draws.iter().map(Draw::input).collect();
            let (found, pullback) = diffusion(ctx.model, NAME)?.velocities(&inputs, Adapter::On, Grad::Record)?;
            let mut cotangents = Vec::new();
            for (draw, velocity) in draws.iter().zip(found.unstack()?) {
                let valued = self.loss(plan, draw, &velocity, tally)?;
                if !valued.value.is_finite() {
                    tally.nonfinite = Some((format!("the loss at noise level {:.3}", draw.sigma.0), valued.value));
                    return Ok(());
                }
                let share = 1.0 / self.config.levels_per_video as f64;
                let cotangent = valued.gradient.iter().map(|d| (share * d) as f32).collect::<Vec<f32>>();
                cotangents.push(Tensor::new(cotangent, velocity.shape())?);
            }
            begin(watch, update, PULL, "pulling back")?;
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
        let (count, n) = (self.config.levels_per_video, video.latents.len());
        // The key of a draw: the updates of a step have their own.
        let key = video.key ^ ((update as u64) << 28);
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
    fn loss(&self, plan: &Plan, draw: &Draw<'_>, velocity: &Tensor, tally: &mut Tally) -> Result<Valued> {
        let config = &self.config;
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
        let advantage = draw.video.advantage.clamp(-config.advantage_clip, config.advantage_clip);
        let mut valued = match config.loss {
            Regression::Nft => plan.nft.at(advantage, &at).loss,
            Regression::Awm => {
                let (term, valued) = awm::at_level(config.matching, advantage, plan.clip, &at);
                tally.mean("actor/ratio", term.ratio);
                tally.mean("actor/clip_fraction", f64::from(u8::from(plan.clip.is_out(term.ratio))));
                valued
            }
            Regression::Awr => awr::at(advantage.clamp(-config.energy_clip, config.energy_clip), &at),
            Regression::Rvm => rvm::at(advantage, &at),
        };
        tally.mean("actor/policy_loss", valued.value);
        let deviation = distance::squared(v, old, counted);
        tally.mean("actor/deviation", deviation);
        valued.value += config.old_kl_weight * deviation;
        distance::add_squared_gradient(&mut valued.gradient, config.old_kl_weight, v, old, counted);
        if let Some(reference) = &draw.reference {
            let reference = reference.f32s()?;
            let kl = distance::squared(v, reference, counted);
            tally.mean("actor/kl_loss", kl);
            valued.value += config.kl_weight * kl;
            distance::add_squared_gradient(&mut valued.gradient, config.kl_weight, v, reference, counted);
        }
        tally.mean("actor/loss", valued.value);
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

/// A phase begins; the user can stop before the first update.
fn begin(watch: &mut Stopwatch<'_>, update: usize, metric: &'static str, words: &str) -> Result<()> {
    match update {
        0 => watch.begin(metric, Some(words)),
        _ => {
            watch.begin_after_update(metric, Some(words));
            Ok(())
        }
    }
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

/// Of one prompt: its rollouts, and three passes for each draw of which one is pulled back.
fn passes(options: &Options) -> Result<Passes> {
    let config: DiffusionNftConfig = parse_options(Kind::Algorithm.section(), options)?;
    let steps = config.timesteps.as_ref().map_or(config.num_inference_steps, Vec::len);
    let velocities = if config.guidance_scale.is_on() { 2 } else { 1 };
    let videos = config.best_of.unwrap_or(config.group_size);
    let draws = videos * config.levels_per_video * config.updates_per_step;
    let references = draws * if config.kl_weight > 0.0 { 2 } else { 1 };
    let forward = config.group_size * velocities * steps + draws;
    let videos = Videos { count: config.group_size, at_once: config.at_once, references };
    Ok(Passes { forward, pulled: draws, steps: Some([steps, config.levels_per_video]), videos: Some(videos) })
}
