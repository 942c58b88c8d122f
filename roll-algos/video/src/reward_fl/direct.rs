//! Direct-Align with a relative reward (SRPO, <https://arxiv.org/abs/2509.06942>): one short step with known noise,
//! whose video is scored under two prompts.
//!
//! The latents x_0 of the finished rollout are noised again by e, the noise that the rollout began with. A step from
//! noise level `at` to `to` then determines the data x', because e is known:
//!
//! ```text
//! x = (1 - at) x_0 + at e      x' = (x + (to - at) v(x, at) - to e) / (1 - to)
//! ```
//!
//! A sample has two steps between a drawn noise level and the level that lies `step` below it. The first step denoises:
//! its score is `(1 + k) r(wanted) - r(unwanted)`. The second step inverts the first: its score is
//! `(1 + k) r(unwanted) - r(wanted)`. k depends on the noise level: `denoise_discount` for the first step,
//! `inversion_discount` for the second.

use std::collections::BTreeMap;
use std::sync::Once;

use roll_core::{
    Conditioning, Error, Grad, Pullback, Result, RewardScorer, Sample, ScheduleFacts, Sigma, Tensor, Video,
};

use super::plan::{EarlyStop, RolloutPlan};
use super::trajectory::Trajectory;
use super::{Direct, RolloutStart};
use crate::FlowSchedule;
use crate::arithmetic::{axpy, scaled};
use crate::flow_matching::mixed;
use crate::scoring::{Measured, PreparedTarget};

/// The number of steps of a sample, each with a video.
pub(super) const STEPS: usize = 2;

/// The lowest noise level that a step begins or ends with: one of the thousand timesteps of the network.
const LEAST_LEVEL: f64 = 1e-3;

/// A step with known noise between two noise levels.
#[derive(Clone, Debug)]
pub struct DirectStep {
    /// Noise level before the step.
    pub at: Sigma,
    /// Noise level after the step; above `at` if the step inverts.
    pub to: Sigma,
    /// Factors of the scores under the wanted and the unwanted prompt.
    pub factors: [f64; 2],
    /// Words before the sample's prompt: the wanted and the unwanted one.
    prompt_prefixes: [String; 2],
    /// e, the noise that the rollout began with.
    noise: Tensor,
}

impl Direct {
    /// Restricts the plan to the steps whose noise level, and the level below it, suit a step with known noise. Fails
    /// if there is no such step, or if `wanted` and `unwanted` are the same word.
    pub(super) fn restricted(&self, plan: RolloutPlan, facts: ScheduleFacts) -> Result<RolloutPlan> {
        if self.wanted.trim() == self.unwanted.trim() {
            let problem = format!("expected another word than `wanted`, found `{}` for both", self.wanted);
            return Err(Error::config("algo.trained_steps.direct.unwanted", problem));
        }
        let fits = |i: &usize| {
            let high = plan.schedule.sigma(*i);
            let low = Sigma(high.0 - self.step);
            // At pure noise, x' of the inversion would be divided by 0.
            let has_data = high.0 < 1.0;
            // The inversion begins at `low`. At level 0 it would have no KL, which is divided by the squared level.
            let has_noise = low.0 >= LEAST_LEVEL;
            // The inversion runs in the expert of `low`, which need not be the expert of `high`.
            let is_trained = FlowSchedule::between(low, high).is_trained(0, facts);
            has_data && has_noise && is_trained
        };
        let fitting_steps: Vec<usize> = plan.acting.iter().copied().filter(fits).collect();
        if fitting_steps.is_empty() {
            let problem = format!(
                "expected a trained step whose noise level is above {step} and below 1, and whose noise level minus \
                 {step} belongs to a trained expert, found none: let `mid_timestep` and `final_timestep` include one",
                step = self.step
            );
            return Err(Error::config("algo.trained_steps.direct.step", problem));
        }
        Ok(plan.training(fitting_steps))
    }

    /// The starts of both steps at the noise level of step `i`, for the rollout that led from `noise` to `data`.
    pub(super) fn starts(
        &self,
        plan: &RolloutPlan,
        data: &Tensor,
        noise: &Tensor,
        i: usize,
    ) -> Result<Vec<RolloutStart>> {
        let lowest = plan.trained.last().map_or(0.0, |last| plan.schedule.sigma(*last).0);
        let highest = plan.trained.first().map_or(0.0, |first| plan.schedule.sigma(*first).0);
        let high = plan.schedule.sigma(i);
        // A single trained level counts as the middle.
        let relative_level = if highest > lowest { (high.0 - lowest) / (highest - lowest) } else { 0.5 };
        let mut starts = Vec::new();
        for step in self.steps(high, relative_level, noise) {
            starts.push(RolloutStart { plan: step.plan(plan), latents: step.latents(data)?, direct: Some(step) });
        }
        Ok(starts)
    }

    /// The step from the noise level `high` to the level below it, and the step back. `relative_level` is the position
    /// of `high` between the lowest trained noise level (0) and the highest (1). `noise` is the noise that the rollout
    /// began with.
    pub fn steps(&self, high: Sigma, relative_level: f64, noise: &Tensor) -> [DirectStep; STEPS] {
        let low = Sigma(high.0 - self.step);
        let k = |[at_lowest, at_highest]: [f64; 2]| at_lowest + relative_level * (at_highest - at_lowest);
        let step = |at, to, factors| {
            let prompt_prefixes = [self.wanted.clone(), self.unwanted.clone()];
            DirectStep { at, to, factors, prompt_prefixes, noise: noise.clone() }
        };
        [
            step(high, low, [1.0 + k(self.denoise_discount), -1.0]),
            step(low, high, [-1.0, 1.0 + k(self.inversion_discount)]),
        ]
    }
}

impl DirectStep {
    /// A plan like `plan`, whose only step is this one.
    pub fn plan(&self, plan: &RolloutPlan) -> RolloutPlan {
        let (schedule, early_stop) = (FlowSchedule::between(self.at, self.to), EarlyStop::Decode);
        RolloutPlan { schedule, first: 0, last: 0, early_stop, ..plan.clone().training(vec![0]) }
    }

    /// The latents x before the step, from the rollout's `data` x_0.
    pub fn latents(&self, data: &Tensor) -> Result<Tensor> {
        mixed(data, self.noise.f32s()?, self.at)
    }

    /// Continues the trajectory of this step from the latents after it to the data x'.
    pub fn finished(&self, trajectory: Trajectory, prompt: &Conditioning) -> Result<Trajectory> {
        let to = self.to.0 as f32;
        // The derivative of x' with respect to the latents after the step.
        let slope = 1.0 / (1.0 - to);
        let data = scaled(&axpy(&trajectory.latents, -to, &self.noise)?, slope)?;
        Ok(trajectory.continued(prompt.with_first_frame(&data)?, slope))
    }

    /// The relative score of a video: the weighted sum of its scores under both prompts. Details are the reward's
    /// details under the wanted prompt, and both scores.
    pub(super) fn measured(
        &self,
        video: &Video,
        sample: &Sample,
        target: &PreparedTarget,
        reward: &mut dyn RewardScorer,
    ) -> Result<Measured> {
        let (mut scores, mut all_details, mut pullbacks) = ([0.0; 2], BTreeMap::new(), Vec::new());
        for (i, name) in ["wanted", "unwanted"].into_iter().enumerate() {
            let prompt = format!("{} {}", self.prompt_prefixes[i], sample.prompt);
            let prompted = Sample { prompt, ..sample.clone() };
            match Measured::of(video, &prompted, target, reward, Grad::Record)? {
                Measured::Skipped(reason) => return Ok(Measured::Skipped(reason)),
                Measured::Score { value, details, pullback } => {
                    if name == "wanted" {
                        all_details.extend(details);
                    }
                    all_details.insert(name.to_string(), value);
                    pullbacks.extend(pullback.map(|pullback| (self.factors[i] as f32, pullback)));
                    scores[i] = value;
                }
            }
        }
        self.warn_of_equal_scores(scores, reward);
        let (is_constant, zeros) = (pullbacks.is_empty(), Tensor::zeros(video.frames().shape()));
        let pull = move |d_score: &Tensor| {
            let add = |sum: Tensor, (factor, pullback): (f32, Pullback)| axpy(&sum, factor, &pullback.pull(d_score)?);
            pullbacks.into_iter().try_fold(zeros, add)
        };
        let pullback = (!is_constant).then(|| Pullback::new(pull));
        let value = self.factors.iter().zip(scores).map(|(factor, score)| factor * score).sum();
        Ok(Measured::Score { value, details: all_details, pullback })
    }

    /// Warns once in a process if equal scores suggest that the reward does not read the prompt.
    fn warn_of_equal_scores(&self, scores: [f64; 2], reward: &dyn RewardScorer) {
        static WARNED: Once = Once::new();
        if scores[0] == scores[1] {
            let ([wanted, unwanted], reward) = (&self.prompt_prefixes, reward.name());
            WARNED.call_once(|| {
                tracing::warn!(
                    "`{reward}` scores a video alike under `{wanted} ...` and `{unwanted} ...`: if it does not read the \
                     prompt, `algo.trained_steps.direct` trains on k times its score; choose a reward that does"
                );
            });
        }
    }
}
