//! Flow-GRPO (arXiv:2505.05470) and its variants: a policy gradient for rewards without a gradient.
//!
//! Per training step: several videos are generated for each prompt. A window of their denoising steps has noise in it
//! ([`crate::policy_gradient::sde`]), so that these steps have a probability. The videos are scored, and advantages say
//! how much better each video is than other videos of its prompt. Then each stochastic step becomes more probable if
//! the advantage of its video is above 0, and less probable if it is below, within a range around the old policy, which
//! generated the videos ([`loss`]).
//!
//! Before the first update the ratio of probabilities is exactly 1, because latents are kept in f32 and training
//! computes velocities from the same latents in the same batches as the rollout. If generation computes otherwise than
//! training, `replay` replaces the velocities of the rollout by the velocities of the first update.

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

        let options = RoundOptions {
            algorithm: NAME,
            sampling: &plan.sampling,
            shared: &shared,
            has_same_start: self.same_latent,
            share_prefix: self.share_prefix,
        };
        let mut explorer = WindowExplorer::new(&plan, ctx.noise, ctx.step);
        let mut groups = generate(&options, &mut state.prepared, ctx, &mut explorer, &mut round)?;
        let are_scores_finite = set_advantages(&shared, ctx, &mut groups, &mut round)?;
        let scale = self.weight_scale(ctx, &plan, &groups)?;
        state.train(&shared, ctx, &mut groups, are_scores_finite, &mut round, |_, ctx, group, round| {
            self.accumulate(ctx, &plan, group, scale, round)
        })?;
        round.report(ctx, &shared)
    }
}

/// Factors of the terms of one step's loss.
#[derive(Clone, Copy)]
struct TermFactors {
    /// Factor of the policy loss: the factor of the KL times the normalised weight of the step (`algo.step_weight`).
    policy: f64,
    /// Factor of the KL: the weight of the sample, divided by the number of trained steps.
    kl: f64,
}

/// A stochastic step of a prompt's videos.
struct StochasticStep<'a> {
    plan: &'a FlowGrpoPlan,
    conditions: &'a Conditions,
    step: SdeStep,
    factors: TermFactors,
}

/// The loss of one video's step.
struct StepLoss {
    value: f64,
    /// The cotangent of the guided velocity.
    d_velocity: Tensor,
    /// The cotangent of the velocity under the prompt, without guidance; `None` without a KL.
    d_conditional: Option<Tensor>,
}

impl FlowGrpoConfig {
    /// The inverse of the mean weight (`algo.step_weight`) of the trained steps of all ranks.
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
            std::iter::repeat_n(weight, record.transitions.len())
        });
        let all = ranks::join_f64(ctx.strategy.ranks().data.as_ref(), weights.collect())?;
        let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
        Ok(if mean > 0.0 { 1.0 / mean } else { 0.0 })
    }

    /// Adds the gradient of one prompt's videos to the accumulators of the strategy. A batch of videos without any
    /// advantage is left out, so that it costs nothing.
    fn accumulate(
        &self,
        ctx: &mut StepContext<'_>,
        plan: &FlowGrpoPlan,
        group: &mut Group<Vec<StepRecord>>,
        weight_scale: f64,
        round: &mut RoundState<'_>,
    ) -> Result<()> {
        let Group { weight, conditions, videos, records, .. } = group;
        let conditions: &Conditions = conditions;
        for (videos, steps) in videos.chunks(self.at_once).zip(records) {
            if videos.iter().all(|video| video.advantage == 0.0) {
                continue;
            }
            let step_share = *weight / steps.len() as f64;
            for record in steps {
                if round.outcome.nonfinite.is_some() {
                    return Ok(());
                }
                let Some(step) = plan.steps[record.step] else { continue };
                let policy = step_share * weight_scale * self.step_weight.of(&step);
                let factors = TermFactors { policy, kl: step_share };
                let stochastic_step = StochasticStep { plan, conditions, step, factors };
                self.accumulate_step(ctx, &stochastic_step, videos, record, round)?;
            }
        }
        Ok(())
    }

    /// Adds the gradient of one stochastic step of a batch of videos to the accumulators of the strategy.
    fn accumulate_step(
        &self,
        ctx: &mut StepContext<'_>,
        stochastic_step: &StochasticStep<'_>,
        videos: &[Rollout],
        record: &mut StepRecord,
        round: &mut RoundState<'_>,
    ) -> Result<()> {
        let &StochasticStep { plan, conditions, .. } = stochastic_step;
        let timestep = plan.sampling.schedule.timestep(record.step);
        let xs: Vec<Tensor> = record.transitions.iter().map(|transition| transition.x.clone()).collect();
        let model = diffusion(ctx.model, NAME)?;
        let references = if self.kl_weight > 0.0 {
            round.begin(REFERENCE, "predicting by the reference")?;
            let conditioning = &conditions.prompt;
            let input = |latents| VelocityInput { latents, timestep, conditioning };
            let inputs: Vec<VelocityInput<'_>> = xs.iter().map(input).collect();
            model.velocities(&inputs, self.kl_reference.adapter(), Grad::Skip)?.0.unstack()?
        } else {
            Vec::new()
        };
        round.begin(FORWARD, "predicting velocities")?;
        let guidance = &plan.sampling.guidance;
        let guided = guidance.velocities(model, &xs, timestep, conditions, Adapter::On, Grad::Record)?;
        let (velocities, conditional) = (guided.velocity.unstack()?, guided.conditional.unstack()?);
        if self.replay && round.update == 0 {
            for (transition, velocity) in record.transitions.iter_mut().zip(&velocities) {
                transition.velocity = velocity.clone();
            }
        }
        let (mut cotangents, mut kl_cotangents) = (Vec::new(), Vec::new());
        for (i, (video, transition)) in videos.iter().zip(&record.transitions).enumerate() {
            let reference = references.get(i);
            let guided_and_conditional = [&velocities[i], &conditional[i]];
            let tally = &mut round.tally;
            let loss = self.loss_at(stochastic_step, video, transition, guided_and_conditional, reference, tally)?;
            if !loss.value.is_finite() {
                round.outcome.nonfinite = Some((format!("the loss at step {}", record.step), loss.value));
                return Ok(());
            }
            cotangents.push(loss.d_velocity);
            kl_cotangents.extend(loss.d_conditional);
        }
        round.begin(PULL, "pulling back")?;
        let pullback = guided.pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
        let d_conditional = if kl_cotangents.is_empty() { None } else { Some(Tensor::stack(&kl_cotangents)?) };
        let (strategy, model) = (&mut *ctx.strategy, &mut *ctx.model);
        pullback.pull(&Tensor::stack(&cotangents)?, d_conditional.as_ref(), || strategy.before_last_pull(model))?;
        ctx.strategy.accumulate(ctx.model)
    }

    /// The loss of one video's step, at the guided `velocity` and at `conditional`, the velocity under the prompt
    /// without guidance. A KL is part of it if there is a `reference`.
    fn loss_at(
        &self,
        stochastic_step: &StochasticStep<'_>,
        video: &Rollout,
        transition: &Transition,
        [velocity, conditional]: [&Tensor; 2],
        reference: Option<&Tensor>,
        tally: &mut Tally,
    ) -> Result<StepLoss> {
        if video.advantage == 0.0 {
            let zeros = Tensor::zeros(velocity.shape());
            return Ok(StepLoss { value: 0.0, d_velocity: zeros.clone(), d_conditional: reference.map(|_| zeros) });
        }
        let &StochasticStep { conditions, step, factors, .. } = stochastic_step;
        // A given first frame is not generated, and so not part of the loss.
        let given_frames = usize::from(conditions.prompt.first_frame.is_some());
        let mask = LossMask::after(given_frames, velocity.shape())?;
        let advantage = clip::bounded(video.advantage, self.advantage_clip);
        let (policy_loss, d_velocity) =
            self.policy_loss_at(stochastic_step, advantage, transition, velocity, mask, tally)?;
        let mut value = policy_loss;
        let d_conditional = match reference {
            None => None,
            Some(reference) => {
                let weight = factors.kl * self.kl_weight;
                let (kl, gradient) = self.kl_at(&step, conditional, reference, mask, weight)?;
                tally.add_to_mean("actor/kl_loss", kl);
                value += self.kl_weight * kl;
                Some(gradient)
            }
        };
        tally.add_to_mean("actor/loss", value);
        Ok(StepLoss { value, d_velocity, d_conditional })
    }

    /// The policy loss of one video's step, and the cotangent of the guided `velocity`.
    fn policy_loss_at(
        &self,
        stochastic_step: &StochasticStep<'_>,
        advantage: f64,
        transition: &Transition,
        velocity: &Tensor,
        mask: LossMask,
        tally: &mut Tally,
    ) -> Result<(f64, Tensor)> {
        let &StochasticStep { plan, step, factors, .. } = stochastic_step;
        // Both means are computed in the same way from the same latents, so that equal velocities have the ratio 1, bit
        // for bit.
        let (x, next) = (transition.x.f32s()?, transition.next_latents()?);
        let (mean, old_mean) = (step.mean(x, velocity.f32s()?), step.mean(x, transition.velocity.f32s()?));
        let shift = PolicyShift {
            log_ratio: step.log_prob(&next, &mean, mask) - step.log_prob(&next, &old_mean, mask),
            squared: mean_shift(&mean, &old_mean, mask),
            std: step.std(),
            variance: step.variance(),
            root: step.root(),
        };
        let StepTerm { term, d_squared, is_dropped } = match self.loss {
            PolicyLoss::Clip => loss::clip(shift, advantage, plan.ratio_range),
            PolicyLoss::Guard => guard(shift, advantage, plan.ratio_range),
            PolicyLoss::Dppo => dppo(shift, advantage, divergence(shift), self.divergence_threshold),
        };
        // Chain rule from the loss through log-probability and squared distance to the mean. d mean / d velocity is the
        // same number for all elements.
        let d_log_prob = step.d_mean(&next, &mean, mask);
        let squared_slope = 2.0 * d_squared / mask.count() as f64;
        let d_mean = |i: usize| term.d_log_prob * d_log_prob[i] + squared_slope * (mean[i] - old_mean[i]);
        let d_velocity = mask.map(|i| factors.policy * step.velocity_factor() * d_mean(i));

        let is_clipped = match self.loss {
            PolicyLoss::Dppo => is_dropped,
            _ => plan.ratio_range.is_out(term.ratio),
        };
        tally.add_to_mean("actor/policy_loss", term.loss);
        tally.add_to_mean("actor/ratio", term.ratio);
        tally.add_to_mean("actor/clip_fraction", f64::from(u8::from(is_clipped)));
        tally.add_to_mean("actor/approx_kl", 0.5 * shift.log_ratio.powi(2));
        tally.add_to_mean("actor/deviation", shift.squared);
        Ok((term.loss, narrow(&d_velocity, velocity.shape())?))
    }

    /// The KL of one video's step from the velocity `reference`, and `weight` times its gradient with respect to the
    /// velocity `conditional`.
    fn kl_at(
        &self,
        step: &SdeStep,
        conditional: &Tensor,
        reference: &Tensor,
        mask: LossMask,
        weight: f64,
    ) -> Result<(f64, Tensor)> {
        let (c, r) = (conditional.f32s()?, reference.f32s()?);
        // The means of a step differ by `velocity_factor` times the difference of velocities.
        let scale = match self.kl_of {
            KlOf::Velocity => 1.0,
            KlOf::Mean => 0.5 * (step.velocity_factor() / step.std()).powi(2),
        };
        let kl = scale * distance::squared(c, r, mask);
        let mut gradient = vec![0.0; c.len()];
        distance::add_squared_gradient(&mut gradient, weight * scale, c, r, mask);
        Ok((kl, narrow(&gradient, conditional.shape())?))
    }
}

/// A tensor of `values`, rounded to f32.
fn narrow(values: &[f64], shape: &[usize]) -> Result<Tensor> {
    Tensor::new(values.iter().map(|v| *v as f32).collect::<Vec<f32>>(), shape)
}

roll_core::register! {
    Algorithm, NAME, FlowGrpoConfig,
    "Trains on scores without a gradient: a policy gradient of noisy denoising steps (Flow-GRPO)",
    |options, _| Ok(FlowGrpo::new(options)),
    plan: passes,
}

/// The passes of the model for one prompt: its rollouts, a differentiated pass per trained step and, with a KL, a pass
/// of the reference. A shared prefix counts with its mean length over all places of the window.
fn passes(options: &Options) -> Result<Passes> {
    let config: FlowGrpoConfig = parse_options(Kind::Algorithm.section(), options)?;
    let shared = config.shared();
    let (steps, velocities) = (shared.denoising_steps(), shared.velocities_per_step());
    let recorded = if config.guidance_gradient == GuidanceGradient::Both { velocities } else { 1 };
    let trained_videos = config.best_of.unwrap_or(config.group_size);
    let trained_steps = trained_videos * config.window * config.updates_per_step;
    let references = if config.kl_weight > 0.0 { trained_steps } else { 0 };
    let prefix =
        if config.share_prefix { config.windows(0..steps.saturating_sub(1))?.mean_start() as usize } else { 0 };
    let denoising = config.group_size * steps - (config.group_size - 1) * prefix;
    let (forward, pulled) = (velocities * (denoising + trained_steps), recorded * trained_steps);
    let videos = Videos { count: config.group_size, at_once: recorded * config.at_once };
    let data_loss_passes = shared.data_loss_passes();
    Ok(Passes {
        forward: forward + data_loss_passes,
        pulled: pulled + data_loss_passes,
        steps: Some([steps, config.window]),
        videos: Some(videos),
        references: Some(references),
        reference_is_start: config.kl_reference == KlReference::Start,
        ..Passes::default()
    })
}
