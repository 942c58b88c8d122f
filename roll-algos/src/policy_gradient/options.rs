//! The options that policy gradients share, by the names that they have in each configuration.

use roll_core::{Error, Result, ResultExt, Sampler, ScheduleFacts};

use super::advantages::Spread;
use super::round::SeveralRewards;
use crate::sampling::{Sampling, SamplingOptions, agreeing_steps};
use crate::scoring::{FrameRate, Reference};
use crate::update::OnNonfinite;

/// More videos of a prompt than that can only be a mistake, and would have no keys for their draws.
const MOST_VIDEOS: usize = 4096;

/// What each configuration says of them. Configurations list them one by one: an error then names its key.
pub struct Shared {
    /// Videos of a prompt.
    pub group_size: usize,
    /// Of these, the best and the worst that are trained on; all when absent.
    pub best_of: Option<usize>,
    /// Videos that are computed side by side.
    pub at_once: usize,
    /// Optimizer updates of a step.
    pub updates_per_step: usize,
    /// What advantages are divided by.
    pub advantage_spread: Spread,
    /// What becomes of several rewards.
    pub several_rewards: SeveralRewards,
    /// Weight of the distance to the model without its adapter.
    pub kl_weight: f64,
    /// Weight of the loss of flow matching on the clips.
    pub data_weight: f64,
    /// Most weight of the past in the policy that is evaluated.
    pub evaluation_average: f64,
    /// How videos are generated, by the sampler of training.
    pub sampling: SamplingOptions,
    /// The sampler of evaluations, where it is another.
    pub evaluation_sampler: Option<Sampler>,
    /// What the reward compares with.
    pub reference: Reference,
    /// Frames a second of generated videos.
    pub frame_rate: FrameRate,
    /// The reaction to a value that is not finite.
    pub on_nonfinite: OnNonfinite,
}

impl Shared {
    /// Fails on numbers that are out of range, naming the key. `data_weight` is checked by its term.
    pub fn check(&self) -> Result<()> {
        let key = |name: &str, problem: String| Err(Error::config(format!("algo.{name}"), problem));
        if self.group_size < 2 {
            return key("group_size", format!("must be at least 2, found {}: one video has no other", self.group_size));
        }
        if self.group_size > MOST_VIDEOS {
            return key("group_size", format!("must be at most {MOST_VIDEOS}, found {}", self.group_size));
        }
        if let Some(n) = self.best_of.filter(|n| !(2..=self.group_size).contains(n)) {
            return key("best_of", format!("must lie between 2 and group_size, {}; found {n}", self.group_size));
        }
        for (name, value) in [("at_once", self.at_once), ("updates_per_step", self.updates_per_step)] {
            if value == 0 {
                return key(name, "must be at least 1, found 0".into());
            }
        }
        if !(self.kl_weight.is_finite() && self.kl_weight >= 0.0) {
            return key("kl_weight", format!("must be at least 0, found {}", self.kl_weight));
        }
        match (0.0..1.0).contains(&self.evaluation_average) {
            true => Ok(()),
            false => {
                key("evaluation_average", format!("must be at least 0 and below 1, found {}", self.evaluation_average))
            }
        }
    }

    /// How training generates. `default_steps` is the number of steps that nobody asked for.
    pub fn training(&self, facts: ScheduleFacts, default_steps: usize) -> Result<Sampling> {
        let SamplingOptions { timesteps, num_inference_steps, .. } = &self.sampling;
        agreeing_steps(timesteps.as_deref(), *num_inference_steps, default_steps).in_section("algo")?;
        self.sampling.sampling(facts).in_section("algo")
    }

    /// How evaluations generate.
    pub fn evaluation(&self, facts: ScheduleFacts) -> Result<Sampling> {
        let sampler = self.evaluation_sampler.unwrap_or(self.sampling.sampler);
        SamplingOptions { sampler, ..self.sampling.clone() }.sampling(facts).in_section("algo")
    }

    /// Steps of a video, and the velocities that each of them takes.
    pub fn steps(&self) -> [usize; 2] {
        let SamplingOptions { timesteps, num_inference_steps, guidance_scale, .. } = &self.sampling;
        let steps = timesteps.as_ref().map_or(*num_inference_steps, Vec::len);
        [steps, if guidance_scale.is_on() { 2 } else { 1 }]
    }

    /// Passes that the loss on the clip takes, each of which is pulled back.
    pub fn on_clip(&self) -> usize {
        if self.data_weight > 0.0 { self.updates_per_step } else { 0 }
    }
}
