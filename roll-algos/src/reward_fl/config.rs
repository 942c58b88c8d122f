//! Options of Reward-FL.

use roll_core::{Error, FlowSchedule, Result, ResultExt, ScheduleFacts};

use super::experts::acts;
use super::plan::{EarlyStop, LatentDtype, Plan};
use crate::update::OnNonfinite;

/// Options of the algorithm `reward_fl`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RewardFlConfig {
    /// Denoising steps from noise to data.
    pub num_inference_steps: usize,
    /// First step with gradient; the steps before run without.
    pub mid_timestep: usize,
    /// Last step; what follows it is decoded.
    pub final_timestep: usize,
    /// Only steps whose timestep / 1000 is at most this are trained. Steps left out count as constants.
    pub max_timestep_boundary: f64,
    /// Only steps whose timestep / 1000 is at least this are trained.
    pub min_timestep_boundary: f64,
    /// Shift of the sigma schedule; the model's own when absent.
    pub shift: Option<f64>,
    /// Mean that the score is normalised with.
    pub reward_mean: f64,
    /// Standard deviation that the score is normalised with.
    pub reward_std: f64,
    /// Weight of the normalised score.
    pub reward_weight: f64,
    /// Weight of the KL to the model without its adapter.
    pub kl_weight: f64,
    /// Bound on the magnitude of the normalised score; beyond it there is no gradient.
    pub reward_clip: Option<f64>,
    /// The latents that are decoded when `final_timestep` stops before the last step.
    pub early_stop: EarlyStop,
    /// Precision that latents are rounded to after every step.
    pub latent_dtype: LatentDtype,
    /// The video or picture that the reward compares with.
    pub reference: Reference,
    /// Interval, in steps, at which the gradient norms of reward and KL are measured separately, by a second rollout;
    /// 0 never measures them.
    pub gradient_split_every: u64,
    /// The reaction to a score, loss or gradient that is not finite.
    pub on_nonfinite: OnNonfinite,
}

impl Default for RewardFlConfig {
    fn default() -> Self {
        Self {
            num_inference_steps: 8,
            mid_timestep: 4,
            final_timestep: 7,
            max_timestep_boundary: 1.0,
            min_timestep_boundary: 0.0,
            shift: None,
            reward_mean: 0.54,
            reward_std: 0.16,
            reward_weight: 0.1,
            kl_weight: 1.0,
            reward_clip: None,
            early_stop: EarlyStop::Decode,
            latent_dtype: LatentDtype::F32,
            reference: Reference::Clip,
            gradient_split_every: 0,
            on_nonfinite: OnNonfinite::Skip,
        }
    }
}

/// The video or picture that the reward compares the generated video with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// All frames of the sample's clip: as the reference.
    Clip,
    /// The first frame of the clip.
    FirstFrame,
    /// The sample's picture, or the first frame where it has none.
    Image,
}

impl RewardFlConfig {
    /// The steps of a rollout under a model with these facts. Fails on values that contradict one another, naming the
    /// key and its range.
    pub fn plan(&self, facts: ScheduleFacts) -> Result<Plan> {
        let key = |name: &str, problem: String| Err(Error::config(format!("algo.{name}"), problem));
        let shift = self.shift.unwrap_or(facts.shift);
        let schedule = FlowSchedule::new(self.num_inference_steps, shift).in_section("algo")?;
        let (mid, last, steps) = (self.mid_timestep, self.final_timestep, schedule.steps());
        if last >= steps {
            let range = format!("0 to {} with num_inference_steps {steps}", steps - 1);
            return key("final_timestep", format!("must be a step, {range}; found {last}"));
        }
        if mid > last {
            return key("mid_timestep", format!("must be at most final_timestep, {last}; found {mid}"));
        }
        for (name, value) in [
            ("reward_mean", self.reward_mean),
            ("reward_weight", self.reward_weight),
            ("kl_weight", self.kl_weight),
            ("max_timestep_boundary", self.max_timestep_boundary),
            ("min_timestep_boundary", self.min_timestep_boundary),
        ] {
            if !value.is_finite() {
                return key(name, format!("must be finite, found {value}"));
            }
        }
        if self.kl_weight < 0.0 {
            let problem =
                format!("must be at least 0, found {}: it would drive the model away from its base", self.kl_weight);
            return key("kl_weight", problem);
        }
        if !(self.reward_std.is_finite() && self.reward_std > 0.0) {
            return key("reward_std", format!("must be above 0, found {}", self.reward_std));
        }
        if let Some(clip) = self.reward_clip.filter(|c| !(c.is_finite() && *c > 0.0)) {
            return key("reward_clip", format!("must be above 0, found {clip}"));
        }
        let mut trained = self.window(&schedule);
        if trained.is_empty() {
            let levels = format!("{:.3} to {:.3}", schedule.sigma(last).0, schedule.sigma(mid).0);
            return key(
                "min_timestep_boundary",
                format!(
                    "no step is left to train: steps {mid} to {last} have timestep / 1000 from {levels}, outside \
                     min_timestep_boundary {} to max_timestep_boundary {}; leave both out to train them all, as the \
                     original does, which ignores them",
                    self.min_timestep_boundary, self.max_timestep_boundary
                ),
            );
        }
        let acting: Vec<usize> = trained.iter().copied().filter(|i| acts(&schedule, *i, facts)).collect();
        trained.retain(|i| acting.first().is_none_or(|first| i >= first));
        Ok(Plan { schedule, trained, acting, last, early_stop: self.early_stop, latent_dtype: self.latent_dtype })
    }

    /// The steps that are to be trained, whichever expert works there.
    pub(super) fn window(&self, schedule: &FlowSchedule) -> Vec<usize> {
        let allowed = self.min_timestep_boundary..=self.max_timestep_boundary;
        (self.mid_timestep..=self.final_timestep).filter(|&i| allowed.contains(&schedule.sigma(i).0)).collect()
    }
}
