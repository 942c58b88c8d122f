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
    Adapter, Grad, Kind, Options, Result, RewardScorer, ScheduleFacts, StepContext, StepReport, Tensor, VelocityInput,
    parse_options,
    plan::{Passes, Videos},
};
use roll_step::stopwatch::{FORWARD, PULL, REFERENCE};
use roll_step::update::diffusion;
use roll_step::{AlgorithmError, ranks};

pub use config::{FlowGrpoConfig, KlOf, StepWeight};

use crate::kl_reference::KlReference;
use crate::policy_gradient::round::{Group, Rollout, RoundOptions, RoundState, generate, set_advantages};
use crate::policy_gradient::sde::SdeStep;
use crate::policy_gradient::tally::Tally;
use crate::policy_gradient::{
    LossMask, Method, PolicyGradient, SharedOptions, TrainingState, clip, distance, shared_options,
};
use crate::sampling::{Conditions, GuidanceGradient};

use crate::Sampler;
use config::FlowGrpoPlan;
use explore::{StepRecord, Transition, WindowExplorer};
use loss::{PolicyLoss, PolicyShift, StepTerm, divergence, dppo, guard, mean_shift};

const NAME: &str = "flow_grpo";

/// The algorithm `flow_grpo`.
pub type FlowGrpo = PolicyGradient<FlowGrpoConfig>;

impl Method for FlowGrpoConfig {
    const NAME: &'static str = NAME;
    const HAS_OLD_POLICY: bool = false;

    fn shared(&self) -> SharedOptions {
        shared_options!(self, Sampler::Euler)
    }

    fn check(&self, facts: ScheduleFacts, _reward: &dyn RewardScorer) -> Result<()> {
        self.plan(facts).map(drop)
    }

    fn round(&self, state: &mut TrainingState, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let (shared, plan) = (self.shared(), self.plan(diffusion(ctx.model, NAME)?.schedule())?);
        let mut round = RoundState::new(ctx);

        let (sampling, same_start, share_prefix) = (&plan.sampling, self.same_latent, self.share_prefix);
        let options = RoundOptions { algorithm: NAME, sampling, shared: &shared, same_start, share_prefix };
        let mut explorer = WindowExplorer::new(&plan, ctx.noise, ctx.step);
        let mut groups = generate(&options, &mut state.prepared, ctx, &mut explorer, &mut round)?;
        let is_finite = set_advantages(&shared, ctx, &mut groups, &mut round)?;
        let scale = self.weight_scale(ctx, &plan, &groups)?;
        state.train(&shared, ctx, &mut groups, is_finite, &mut round, |_, ctx, group, round| {
            self.accumulate(ctx, &plan, group, scale, round)
        })?;
        round.report(ctx, &shared)
    }
}

impl FlowGrpoConfig {
    /// One over the mean weight of the trained steps, over all ranks.
    fn weight_scale(
        &self,
        ctx: &StepContext<'_>,
        plan: &FlowGrpoPlan,
        groups: &[Group<Vec<StepRecord>>],
    ) -> Result<f64> {
        if self.step_weight == StepWeight::Even {
            return Ok(1.0);
        }
        let records = groups.iter().flat_map(|group| &group.records).flatten();
        let weights = records.flat_map(|record| {
            let weight = plan.steps[record.step].map_or(0.0, |step| self.step_weight.of(&step));
            std::iter::repeat_n(weight, record.videos.len())
        });
        let all = ranks::join_f64(ctx.strategy.ranks().data.as_ref(), weights.collect())?;
        let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
        Ok(if mean > 0.0 { 1.0 / mean } else { 0.0 })
    }

    /// Adds the gradient of one prompt's videos to the strategy. A batch of videos without any advantage costs nothing.
    fn accumulate(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &FlowGrpoPlan,
        group: &mut Group<Vec<StepRecord>>,
        weight_scale: f64,
        round: &mut RoundState<'_>,
    ) -> Result<()> {
        let Group { weight, conditions, videos, records, .. } = group;
        for (videos, steps) in videos.chunks(self.at_once).zip(records) {
            if videos.iter().all(|video| video.advantage == 0.0) {
                continue;
            }
            let share = *weight / steps.len() as f64;
            for record in steps {
                if round.outcome.nonfinite.is_some() {
                    return Ok(());
                }
                let Some(step) = plan.steps[record.step] else { continue };
                let factors = [share * weight_scale * self.step_weight.of(&step), share];
                self.accumulate_step(ctx, plan, conditions, videos, record, &step, factors, round)?;
            }
        }
        Ok(())
    }

    /// Adds the gradient of one stochastic step of a batch of videos. `factors` are those of the policy loss and of the
    /// KL.
    #[allow(clippy::too_many_arguments)]
    fn accumulate_step(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &FlowGrpoPlan,
        conditions: &Conditions,
        videos: &[Rollout],
        record: &mut StepRecord,
        step: &SdeStep,
        factors: [f64; 2],
        round: &mut RoundState<'_>,
    ) -> Result<()> {
        let timestep = plan.sampling.schedule.timestep(record.step);
        let xs: Vec<Tensor> = record.videos.iter().map(|video| video.x.clone()).collect();
        let model = diffusion(ctx.model, NAME)?;
        let references = match self.kl_weight > 0.0 {
            false => Vec::new(),
            true => {
                round.begin(REFERENCE, "predicting by the reference")?;
                let conditioning = &conditions.prompt;
                let input = |latents| VelocityInput { latents, timestep, conditioning };
                let inputs: Vec<VelocityInput<'_>> = xs.iter().map(input).collect();
                model.velocities(&inputs, self.kl_reference.adapter(), Grad::Skip)?.0.unstack()?
            }
        };
        round.begin(FORWARD, "predicting velocities")?;
        let guidance = &plan.sampling.guidance;
        let guided = guidance.velocities(model, &xs, timestep, conditions, Adapter::On, Grad::Record)?;
        let (velocities, conditional) = (guided.velocity.unstack()?, guided.conditional.unstack()?);
        if self.replay && round.update == 0 {
            record.videos.iter_mut().zip(&velocities).for_each(|(video, velocity)| video.velocity = velocity.clone());
        }
        let (mut cotangents, mut kl_cotangents) = (Vec::new(), Vec::new());
        for (i, (video, transition)) in videos.iter().zip(&record.videos).enumerate() {
            let reference = references.get(i);
            let (loss, d_velocity, d_conditional) = self.loss_at(
                plan,
                step,
                conditions,
                video,
                transition,
                [&velocities[i], &conditional[i]],
                reference,
                factors,
                &mut round.tally,
            )?;
            if !loss.is_finite() {
                round.outcome.nonfinite = Some((format!("the loss at step {}", record.step), loss));
                return Ok(());
            }
            cotangents.push(d_velocity);
            kl_cotangents.extend(d_conditional);
        }
        round.begin(PULL, "pulling back")?;
        let pullback = guided.pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
        let d_conditional = if kl_cotangents.is_empty() { None } else { Some(Tensor::stack(&kl_cotangents)?) };
        let (strategy, model) = (&mut *ctx.strategy, &mut *ctx.model);
        pullback.pull(&Tensor::stack(&cotangents)?, d_conditional.as_ref(), || strategy.before_last_pull(model))?;
        ctx.strategy.accumulate(ctx.model)
    }

    /// The loss of one video's step, and its cotangents: of the guided velocity, and of the one under the prompt.
    #[allow(clippy::too_many_arguments)]
    fn loss_at(
        &self,
        plan: &FlowGrpoPlan,
        step: &SdeStep,
        conditions: &Conditions,
        video: &Rollout,
        transition: &Transition,
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
        let mask = LossMask::after(known, velocity.shape())?;
        // Both in the same way from the same latents: equal velocities have the ratio 1, bit for bit.
        let (x, next) = (transition.x.f32s()?, transition.next()?);
        let (mean, old_mean) = (step.mean(x, velocity.f32s()?), step.mean(x, transition.velocity.f32s()?));
        let shift = PolicyShift {
            log_ratio: step.log_prob(&next, &mean, mask) - step.log_prob(&next, &old_mean, mask),
            squared: mean_shift(&mean, &old_mean, mask),
            std: step.std(),
            variance: step.variance(),
            root: step.root(),
        };
        let advantage = clip::bounded(video.advantage, self.advantage_clip);
        let StepTerm { term, d_squared, is_dropped } = match self.loss {
            PolicyLoss::Clip => loss::clip(shift, advantage, plan.clip),
            PolicyLoss::Guard => guard(shift, advantage, plan.clip),
            PolicyLoss::Dppo => dppo(shift, advantage, divergence(shift), self.divergence_threshold),
        };
        // d mean / d velocity is one number.
        let d_log_prob = step.d_mean(&next, &mean, mask);
        let of_squared = 2.0 * d_squared / mask.count() as f64;
        let d_mean = |i: usize| term.d_log_prob * d_log_prob[i] + of_squared * (mean[i] - old_mean[i]);
        let d_velocity = mask.map(|i| factor * step.of_velocity() * d_mean(i));

        let is_clipped = match self.loss {
            PolicyLoss::Dppo => is_dropped,
            _ => plan.clip.is_out(term.ratio),
        };
        tally.mean("actor/policy_loss", term.loss);
        tally.mean("actor/ratio", term.ratio);
        tally.mean("actor/clip_fraction", f64::from(u8::from(is_clipped)));
        tally.mean("actor/approx_kl", 0.5 * shift.log_ratio.powi(2));
        tally.mean("actor/deviation", shift.squared);
        let mut value = term.loss;
        let d_conditional = match reference {
            None => None,
            Some(reference) => {
                let (c, r) = (conditional.f32s()?, reference.f32s()?);
                let scale = match self.kl_of {
                    KlOf::Velocity => 1.0,
                    KlOf::Mean => 0.5 * (step.of_velocity() / step.std()).powi(2),
                };
                let kl = scale * distance::squared(c, r, mask);
                tally.mean("actor/kl_loss", kl);
                value += self.kl_weight * kl;
                let mut gradient = vec![0.0; c.len()];
                let weight = share * self.kl_weight * scale;
                distance::add_squared_gradient(&mut gradient, weight, c, r, mask);
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

roll_core::register! {
    Algorithm, NAME, FlowGrpoConfig,
    "Trains on scores without a gradient: a policy gradient of noisy denoising steps (Flow-GRPO)",
    |options, _| Ok(FlowGrpo::new(options)),
    plan: passes,
}

/// The passes for one prompt: its rollouts, and two passes for each stochastic step, one of which is differentiated. A
/// shared prefix counts with its mean length over all places of the window.
fn passes(options: &Options) -> Result<Passes> {
    let config: FlowGrpoConfig = parse_options(Kind::Algorithm.section(), options)?;
    let shared = config.shared();
    let [steps, velocities] = shared.steps();
    let recorded = if config.guidance_gradient == GuidanceGradient::Both { velocities } else { 1 };
    let draws = config.best_of.unwrap_or(config.group_size) * config.window * config.updates_per_step;
    let references = if config.kl_weight > 0.0 { draws } else { 0 };
    let prefix = match config.share_prefix {
        true => config.windows(0..steps.saturating_sub(1))?.mean_start() as usize,
        false => 0,
    };
    let denoising = config.group_size * steps - (config.group_size - 1) * prefix;
    let (forward, pulled) = (velocities * (denoising + draws), recorded * draws);
    let videos = Videos { count: config.group_size, at_once: recorded * config.at_once };
    let on_clip = shared.on_clip();
    let steps = Some([steps, config.window]);
    Ok(Passes {
        forward: forward + on_clip,
        pulled: pulled + on_clip,
        steps,
        videos: Some(videos),
        references: Some(references),
        reference_is_start: config.kl_reference == KlReference::Start,
        ..Passes::default()
    })
}
