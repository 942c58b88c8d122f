//! Flow-GRPO (arXiv:2505.05470) and its variants: a policy gradient for rewards without a gradient.
//!
//! Per step: videos are generated for each prompt, a window of their denoising steps with noise in them
//! ([`crate::policy_gradient::sde`]), so that these steps have a probability. The videos are scored, and advantages say
//! how much better each is than the others of its prompt. Then each stochastic step becomes more probable where the
//! advantage is above 0, and less where it is below, within a range around the policy that took it ([`loss`]).
//!
//! Before the first update the ratio of probabilities is exactly 1: latents are kept in f32, and the trained velocity
//! is computed from the same latents in the same company as the one that was sampled by.

pub mod config;
pub mod loss;
pub mod window;

mod explore;
mod notes;
#[cfg(test)]
mod tests;

use roll_core::plan::{Passes, Videos};
use roll_core::registry::{default_options, parse_options};
use roll_core::{
    Adapter, Algorithm, Evaluated, EvaluationContext, Factory, Grad, Headline, Kind, Model, Options, Planner,
    Registration, Result, RewardScorer, StateDict, StepContext, StepReport, Tensor, VelocityInput,
};

pub use config::{FlowGrpoConfig, KlOf};

use crate::policy_gradient::levels::generate_measured;
use crate::policy_gradient::round::{
    FORWARD, Group, OPTIMIZER, PHASES, PULL, REFERENCE, Rollout, RoundOptions, generate, judge,
};
use crate::policy_gradient::sde::SdeStep;
use crate::policy_gradient::slow_copies::{SlowCopies, with_parameters};
use crate::policy_gradient::tally::{Tally, headlines};
use crate::policy_gradient::{Counted, clip, distance};
use crate::sampling::GuidanceGradient;
use crate::scoring::{self, Generation, Prepared};
use crate::stopwatch::Stopwatch;
use crate::update::diffusion;
use crate::{AlgorithmError, ranks, update};
use config::Plan;
use explore::{Taken, TakenBy, Windowed};
use loss::{Moved, PolicyLoss, StepTerm, divergence, dppo, guard, squared_move};

const NAME: &str = "flow_grpo";

/// The algorithm `flow_grpo`.
pub struct FlowGrpo {
    config: FlowGrpoConfig,
    prepared: Prepared,
    copies: SlowCopies,
    /// Updates that were made.
    updates: u64,
}

impl FlowGrpo {
    /// With these options.
    pub fn new(config: FlowGrpoConfig) -> Self {
        Self { config, prepared: Prepared::default(), copies: SlowCopies::default(), updates: 0 }
    }
}

impl Algorithm for FlowGrpo {
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let facts = diffusion(model, NAME)?.schedule();
        if model.parameter_count() == 0 {
            return Err(AlgorithmError::NothingToTrain.into());
        }
        reward.ok_or(AlgorithmError::NoReward { algorithm: NAME })?;
        self.config.plan(facts)?;
        self.copies.begin(model, false, self.config.evaluation_average > 0.0)
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

impl FlowGrpo {
    fn round(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let plan = self.config.plan(diffusion(ctx.model, NAME)?.schedule())?;
        let mut watch = Stopwatch::new(ctx.progress, &PHASES);
        let mut tally = Tally::default();
        ctx.strategy.discard();

        let options = RoundOptions {
            algorithm: NAME,
            sampling: &plan.sampling,
            group_size: self.config.group_size,
            at_once: self.config.at_once,
            same_start: self.config.same_latent,
            negative_prompt: &self.config.negative_prompt,
            reference: self.config.reference,
            frame_rate: self.config.frame_rate,
        };
        let mut windowed = Windowed::new(&plan, ctx.noise, ctx.step);
        let mut groups = generate(&options, &mut self.prepared, ctx, &mut windowed, &mut watch, &mut tally)?;
        let is_finite = judge(self.config.judgement(), ctx, &mut groups, &mut tally)?;
        let scale = self.rescaling(ctx, &plan, &groups)?;

        let updates = if is_finite { self.config.updates_per_step } else { 1 };
        for number in 0..updates {
            if is_finite {
                for group in &groups {
                    self.climb(ctx, &plan, group, scale, number, &mut watch, &mut tally)?;
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

        let ranks = ctx.strategy.communicator();
        let seconds = update::slowest(ranks, watch.seconds())?;
        let alias = ctx.reward.as_deref().and_then(|reward| reward.measures().alias);
        Ok(tally.joined(ranks)?.report(ctx.learning_rate, alias, seconds))
    }

    /// One over the mean of the trained steps' factors, over all ranks; `None` without rescaling.
    fn rescaling(&self, ctx: &StepContext<'_>, plan: &Plan, groups: &[Group<Vec<Taken>>]) -> Result<Option<f64>> {
        if !self.config.rescale {
            return Ok(None);
        }
        let taken = groups.iter().flat_map(|group| &group.kept).flatten();
        let factors = taken.flat_map(|taken| {
            let factor = plan.steps[taken.at].map_or(0.0, |step| step.rescale());
            std::iter::repeat_n(factor, taken.videos.len())
        });
        let all = ranks::join_bits(ctx.strategy.communicator(), factors.collect())?;
        let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
        Ok(Some(if mean > 0.0 { 1.0 / mean } else { 0.0 }))
    }

    /// Adds the gradient of one prompt's videos to the strategy. Videos side by side of which none has an advantage
    /// cost nothing.
    #[allow(clippy::too_many_arguments)] // a round, and one group of it
    fn climb(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &Plan,
        group: &Group<Vec<Taken>>,
        rescaling: Option<f64>,
        update: usize,
        watch: &mut Stopwatch<'_>,
        tally: &mut Tally,
    ) -> Result<()> {
        for (videos, steps) in group.videos.chunks(self.config.at_once).zip(&group.kept) {
            if videos.iter().all(|video| video.advantage == 0.0) {
                continue;
            }
            for taken in steps {
                if tally.nonfinite.is_some() {
                    return Ok(());
                }
                let Some(step) = plan.steps[taken.at] else { continue };
                let share = 1.0 / steps.len() as f64;
                let factors = [share * rescaling.map_or(1.0, |scale| scale * step.rescale()), share];
                self.climb_step(ctx, plan, group, videos, taken, &step, factors, update, watch, tally)?;
            }
        }
        Ok(())
    }

    /// The same of one stochastic step of videos side by side; `factors` are those of the policy loss and of the KL.
    #[allow(clippy::too_many_arguments)]
    fn climb_step(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &Plan,
        group: &Group<Vec<Taken>>,
        videos: &[Rollout],
        taken: &Taken,
        step: &SdeStep,
        factors: [f64; 2],
        update: usize,
        watch: &mut Stopwatch<'_>,
        tally: &mut Tally,
    ) -> Result<()> {
        let timestep = plan.sampling.schedule.timestep(taken.at);
        let xs: Vec<Tensor> = taken.videos.iter().map(|video| video.x.clone()).collect();
        let model = diffusion(ctx.model, NAME)?;
        let references = match self.config.kl_weight > 0.0 {
            false => Vec::new(),
            true => {
                begin(watch, update, REFERENCE, "predicting without the adapter")?;
                let conditioning = &group.conditions.prompt;
                let input = |latents| VelocityInput { latents, timestep, conditioning };
                let inputs: Vec<VelocityInput<'_>> = xs.iter().map(input).collect();
                model.velocities(&inputs, Adapter::Off, Grad::Skip)?.0.unstack()?
            }
        };
        begin(watch, update, FORWARD, "predicting velocities")?;
        let guidance = &plan.sampling.guidance;
        let found = guidance.velocities(model, &xs, timestep, &group.conditions, Adapter::On, Grad::Record)?;
        let (velocities, conditional) = (found.velocity.unstack()?, found.conditional.unstack()?);
        let (mut cotangents, mut of_kl) = (Vec::new(), Vec::new());
        for (i, (video, by)) in videos.iter().zip(&taken.videos).enumerate() {
            let reference = references.get(i);
            let (term, d_velocity, d_conditional) =
                self.term(plan, step, group, video, by, [&velocities[i], &conditional[i]], reference, factors, tally)?;
            if !term.is_finite() {
                tally.nonfinite = Some((format!("the loss at step {}", taken.at), term));
                return Ok(());
            }
            cotangents.push(d_velocity);
            of_kl.extend(d_conditional);
        }
        begin(watch, update, PULL, "pulling back")?;
        let pullback = found.pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
        let of_kl = if of_kl.is_empty() { None } else { Some(Tensor::stack(&of_kl)?) };
        let (strategy, model) = (&mut *ctx.strategy, &mut *ctx.model);
        pullback.pull(&Tensor::stack(&cotangents)?, of_kl.as_ref(), || strategy.before_last_pull(model))?;
        ctx.strategy.accumulate(ctx.model)
    }

    /// The loss of one video's step, and its cotangents: of the guided velocity, and of the one under the prompt.
    #[allow(clippy::too_many_arguments)]
    fn term(
        &self,
        plan: &Plan,
        step: &SdeStep,
        group: &Group<Vec<Taken>>,
        video: &Rollout,
        taken: &TakenBy,
        [velocity, conditional]: [&Tensor; 2],
        reference: Option<&Tensor>,
        [factor, share]: [f64; 2],
        tally: &mut Tally,
    ) -> Result<(f64, Tensor, Option<Tensor>)> {
        let config = &self.config;
        if video.advantage == 0.0 {
            let zeros = Tensor::zeros(velocity.shape());
            return Ok((0.0, zeros.clone(), reference.map(|_| zeros)));
        }
        let known = usize::from(group.conditions.prompt.first_frame.is_some());
        let counted = Counted::after(known, velocity.shape())?;
        // Both in the same way from the same latents: equal velocities have the ratio 1, bit for bit.
        let (x, next) = (taken.x.f32s()?, taken.next()?);
        let (mean, old_mean) = (step.mean(x, velocity.f32s()?), step.mean(x, taken.velocity.f32s()?));
        let moved = Moved {
            log_ratio: step.log_prob(&next, &mean, counted) - step.log_prob(&next, &old_mean, counted),
            squared: squared_move(&mean, &old_mean, counted),
            level: step.level(),
            root: step.root(),
        };
        let advantage = clip::bounded(video.advantage, config.advantage_clip);
        let StepTerm { term, d_squared, is_left_out } = match config.loss {
            PolicyLoss::Clip => loss::clip(moved, advantage, plan.clip),
            PolicyLoss::Guard => guard(moved, advantage, plan.clip),
            PolicyLoss::Dppo => dppo(moved, advantage, divergence(moved), config.divergence_threshold),
        };
        // d mean / d velocity is one number.
        let d_log_prob = step.d_mean(&next, &mean, counted);
        let of_squared = 2.0 * d_squared / counted.count() as f64;
        let d_mean = |i: usize| term.d_log_prob * d_log_prob[i] + of_squared * (mean[i] - old_mean[i]);
        let d_velocity = counted.map(|i| factor * step.of_velocity() * d_mean(i));

        let out = match config.loss {
            PolicyLoss::Dppo => is_left_out,
            _ => plan.clip.is_out(term.ratio),
        };
        tally.mean("actor/policy_loss", term.loss);
        tally.mean("actor/ratio", term.ratio);
        tally.mean("actor/clip_fraction", f64::from(u8::from(out)));
        tally.mean("actor/approx_kl", 0.5 * moved.log_ratio.powi(2));
        tally.mean("actor/deviation", moved.squared);
        let mut value = term.loss;
        let d_conditional = match reference {
            None => None,
            Some(reference) => {
                let (c, r) = (conditional.f32s()?, reference.f32s()?);
                let scale = match config.kl_of {
                    KlOf::Velocity => 1.0,
                    KlOf::Mean => 0.5 * (step.of_velocity() / step.std()).powi(2),
                };
                let kl = scale * distance::squared(c, r, counted);
                tally.mean("actor/kl_loss", kl);
                value += config.kl_weight * kl;
                let mut gradient = vec![0.0; c.len()];
                let weight = share * config.kl_weight * scale;
                distance::add_squared_gradient(&mut gradient, weight, c, r, counted);
                Some(narrow(&gradient, conditional.shape())?)
            }
        };
        tally.mean("actor/loss", value);
        Ok((value, narrow(&d_velocity, velocity.shape())?, d_conditional))
    }
}

fn narrow(values: &[f64], shape: &[usize]) -> Result<Tensor> {
    Tensor::new(values.iter().map(|v| *v as f32).collect::<Vec<f32>>(), shape)
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
        summary: "Trains on scores without a gradient: a policy gradient of noisy denoising steps (Flow-GRPO)",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<FlowGrpoConfig>,
        keys: roll_core::keys::of::<FlowGrpoConfig>,
        factory: Factory::Algorithm(|options, _| Ok(Box::new(FlowGrpo::new(parse_options("algo", options)?)))),
        planner: Some(Planner::Algorithm(passes)),
    }
}

/// Of one prompt: its rollouts, and two passes for each stochastic step of which one is pulled back.
fn passes(options: &Options) -> Result<Passes> {
    let config: FlowGrpoConfig = parse_options(Kind::Algorithm.section(), options)?;
    let steps = config.timesteps.as_ref().map_or(config.num_inference_steps, Vec::len);
    let velocities = if config.guidance_scale.is_on() { 2 } else { 1 };
    let recorded = if config.guidance_gradient == GuidanceGradient::Both { velocities } else { 1 };
    let draws = config.best_of.unwrap_or(config.group_size) * config.window * config.updates_per_step;
    let references = if config.kl_weight > 0.0 { draws } else { 0 };
    let forward = config.group_size * velocities * steps + velocities * draws;
    let at_once = recorded * config.at_once;
    let videos = Videos { count: config.group_size, at_once, references };
    Ok(Passes { forward, pulled: recorded * draws, steps: Some([steps, config.window]), videos: Some(videos) })
}
