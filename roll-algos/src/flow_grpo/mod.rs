//! Flow-GRPO (arXiv:2505.05470) and its variants: a policy gradient for rewards without a gradient.
//!
//! Per step: videos are generated for each prompt, a window of their denoising steps with noise in them
//! ([`crate::policy_gradient::sde`]), so that these steps have a probability. The videos are scored, and advantages say
//! how much better each is than the others of its prompt. Then each stochastic step becomes more probable where the
//! advantage is above 0, and less where it is below, within a range around the policy that took it ([`loss`]).
//!
//! Before the first update the ratio of probabilities is exactly 1: latents are kept in f32, and the trained velocity
//! is computed from the same latents in the same company as the one that was sampled by. Where generation computes
//! otherwise than training, `replay` takes the velocities of the first update for those that were sampled by.

pub mod config;
pub mod loss;
pub mod window;

mod explore;
mod notes;
#[cfg(test)]
mod tests;

use roll_core::{
    Adapter, Factory, Grad, Kind, Options, Planner, Registration, Result, RewardScorer, ScheduleFacts, StepContext,
    StepReport, Tensor, VelocityInput, default_options, parse_options,
    plan::{Passes, Videos},
};

pub use config::{FlowGrpoConfig, KlOf};

use crate::policy_gradient::round::{Group, Rollout, RoundOptions, Running, generate, judge};
use crate::policy_gradient::sde::SdeStep;
use crate::policy_gradient::tally::Tally;
use crate::policy_gradient::{Counted, Kept, Method, PolicyGradient, Shared, clip, distance};
use crate::sampling::{Conditions, GuidanceGradient};
use crate::stopwatch::{FORWARD, PULL, REFERENCE};
use crate::update::diffusion;
use crate::{AlgorithmError, ranks};
use config::Plan;
use explore::{Taken, TakenBy, Windowed};
use loss::{Moved, PolicyLoss, StepTerm, divergence, dppo, guard, squared_move};

const NAME: &str = "flow_grpo";

/// The algorithm `flow_grpo`.
pub type FlowGrpo = PolicyGradient<FlowGrpoConfig>;

impl Method for FlowGrpoConfig {
    const NAME: &'static str = NAME;
    const HAS_OLD_POLICY: bool = false;

    fn shared(&self) -> Shared {
        self.shared_options()
    }

    fn check(&self, facts: ScheduleFacts, _reward: &dyn RewardScorer) -> Result<()> {
        self.plan(facts).map(drop)
    }

    fn round(&self, kept: &mut Kept, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let (shared, plan) = (self.shared(), self.plan(diffusion(ctx.model, NAME)?.schedule())?);
        let mut run = Running::new(ctx, &shared);

        let same_start = self.same_latent;
        let options = RoundOptions { algorithm: NAME, sampling: &plan.sampling, shared: &shared, same_start };
        let mut windowed = Windowed::new(&plan, ctx.noise, ctx.step);
        let mut groups = generate(&options, &mut kept.prepared, ctx, &mut windowed, &mut run)?;
        let is_finite = judge(&shared, ctx, &mut groups, &mut run.tally)?;
        let scale = self.rescaling(ctx, &plan, &groups)?;
        kept.train(&shared, ctx, &mut groups, is_finite, &mut run, |_, ctx, group, run| {
            self.climb(ctx, &plan, group, scale, run)
        })?;
        run.report(ctx)
    }
}

impl FlowGrpoConfig {
    /// One over the mean of the trained steps' factors, over all ranks; `None` without rescaling.
    fn rescaling(&self, ctx: &StepContext<'_>, plan: &Plan, groups: &[Group<Vec<Taken>>]) -> Result<Option<f64>> {
        if !self.rescale {
            return Ok(None);
        }
        let taken = groups.iter().flat_map(|group| &group.kept).flatten();
        let factors = taken.flat_map(|taken| {
            let factor = plan.steps[taken.at].map_or(0.0, |step| step.rescale());
            std::iter::repeat_n(factor, taken.videos.len())
        });
        let all = ranks::join_bits(ctx.strategy.ranks().data.as_ref(), factors.collect())?;
        let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
        Ok(Some(if mean > 0.0 { 1.0 / mean } else { 0.0 }))
    }

    /// Adds the gradient of one prompt's videos to the strategy. Videos side by side of which none has an advantage
    /// cost nothing.
    fn climb(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &Plan,
        group: &mut Group<Vec<Taken>>,
        rescaling: Option<f64>,
        run: &mut Running<'_>,
    ) -> Result<()> {
        let Group { conditions, videos, kept, .. } = group;
        for (videos, steps) in videos.chunks(self.at_once).zip(kept) {
            if videos.iter().all(|video| video.advantage == 0.0) {
                continue;
            }
            let share = 1.0 / steps.len() as f64;
            for taken in steps {
                if run.tally.nonfinite.is_some() {
                    return Ok(());
                }
                let Some(step) = plan.steps[taken.at] else { continue };
                let factors = [share * rescaling.map_or(1.0, |scale| scale * step.rescale()), share];
                self.climb_step(ctx, plan, conditions, videos, taken, &step, factors, run)?;
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
        conditions: &Conditions,
        videos: &[Rollout],
        taken: &mut Taken,
        step: &SdeStep,
        factors: [f64; 2],
        run: &mut Running<'_>,
    ) -> Result<()> {
        let timestep = plan.sampling.schedule.timestep(taken.at);
        let xs: Vec<Tensor> = taken.videos.iter().map(|video| video.x.clone()).collect();
        let model = diffusion(ctx.model, NAME)?;
        let references = match self.kl_weight > 0.0 {
            false => Vec::new(),
            true => {
                run.begin(REFERENCE, "predicting without the adapter")?;
                let conditioning = &conditions.prompt;
                let input = |latents| VelocityInput { latents, timestep, conditioning };
                let inputs: Vec<VelocityInput<'_>> = xs.iter().map(input).collect();
                model.velocities(&inputs, Adapter::Off, Grad::Skip)?.0.unstack()?
            }
        };
        run.begin(FORWARD, "predicting velocities")?;
        let guidance = &plan.sampling.guidance;
        let found = guidance.velocities(model, &xs, timestep, conditions, Adapter::On, Grad::Record)?;
        let (velocities, conditional) = (found.velocity.unstack()?, found.conditional.unstack()?);
        if self.replay && run.update == 0 {
            taken.videos.iter_mut().zip(&velocities).for_each(|(by, velocity)| by.velocity = velocity.clone());
        }
        let (mut cotangents, mut of_kl) = (Vec::new(), Vec::new());
        for (i, (video, by)) in videos.iter().zip(&taken.videos).enumerate() {
            let reference = references.get(i);
            let (term, d_velocity, d_conditional) = self.term(
                plan,
                step,
                conditions,
                video,
                by,
                [&velocities[i], &conditional[i]],
                reference,
                factors,
                &mut run.tally,
            )?;
            if !term.is_finite() {
                run.tally.nonfinite = Some((format!("the loss at step {}", taken.at), term));
                return Ok(());
            }
            cotangents.push(d_velocity);
            of_kl.extend(d_conditional);
        }
        run.begin(PULL, "pulling back")?;
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
        conditions: &Conditions,
        video: &Rollout,
        taken: &TakenBy,
        [velocity, conditional]: [&Tensor; 2],
        reference: Option<&Tensor>,
        [factor, share]: [f64; 2],
        tally: &mut Tally,
    ) -> Result<(f64, Tensor, Option<Tensor>)> {
        if video.advantage == 0.0 {
            let zeros = Tensor::zeros(velocity.shape());
            return Ok((0.0, zeros.clone(), reference.map(|_| zeros)));
        }
        let known = usize::from(conditions.prompt.first_frame.is_some());
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
        let advantage = clip::bounded(video.advantage, self.advantage_clip);
        let StepTerm { term, d_squared, is_left_out } = match self.loss {
            PolicyLoss::Clip => loss::clip(moved, advantage, plan.clip),
            PolicyLoss::Guard => guard(moved, advantage, plan.clip),
            PolicyLoss::Dppo => dppo(moved, advantage, divergence(moved), self.divergence_threshold),
        };
        // d mean / d velocity is one number.
        let d_log_prob = step.d_mean(&next, &mean, counted);
        let of_squared = 2.0 * d_squared / counted.count() as f64;
        let d_mean = |i: usize| term.d_log_prob * d_log_prob[i] + of_squared * (mean[i] - old_mean[i]);
        let d_velocity = counted.map(|i| factor * step.of_velocity() * d_mean(i));

        let out = match self.loss {
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
                let scale = match self.kl_of {
                    KlOf::Velocity => 1.0,
                    KlOf::Mean => 0.5 * (step.of_velocity() / step.std()).powi(2),
                };
                let kl = scale * distance::squared(c, r, counted);
                tally.mean("actor/kl_loss", kl);
                value += self.kl_weight * kl;
                let mut gradient = vec![0.0; c.len()];
                let weight = share * self.kl_weight * scale;
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

/// The passes for one prompt: its rollouts, and two passes for each stochastic step, one of which is differentiated.
fn passes(options: &Options) -> Result<Passes> {
    let config: FlowGrpoConfig = parse_options(Kind::Algorithm.section(), options)?;
    let shared = config.shared();
    let [steps, velocities] = shared.steps();
    let recorded = if config.guidance_gradient == GuidanceGradient::Both { velocities } else { 1 };
    let draws = config.best_of.unwrap_or(config.group_size) * config.window * config.updates_per_step;
    let references = if config.kl_weight > 0.0 { draws } else { 0 };
    let (forward, pulled) = (config.group_size * velocities * steps + velocities * draws, recorded * draws);
    let videos = Videos { count: config.group_size, at_once: recorded * config.at_once, references };
    let on_clip = shared.on_clip();
    let steps = Some([steps, config.window]);
    Ok(Passes {
        forward: forward + on_clip,
        pulled: pulled + on_clip,
        steps,
        videos: Some(videos),
        ..Passes::default()
    })
}
