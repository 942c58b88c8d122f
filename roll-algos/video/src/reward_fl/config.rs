//! Options of Reward-FL.

use crate::{FlowSchedule, Sampler};
use roll_core::keys::check_ranges;
use roll_core::{Error, Result, ResultExt, ScheduleFacts};
use roll_step::update::OnNonfinite;

use super::leap::Leap;
use super::plan::{Adjoint, EarlyStop, RolloutPlan};
use crate::kl_reference::KlReference;
use crate::sampling::{Guidance, GuidanceGradient, GuidanceScale, SamplingOptions, check_steps_agree};
use crate::scoring::{FrameRate, Reference};

/// The trained steps of a rollout: `window`, or another variant with its number or options, as in `{last: 1}`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainedSteps {
    /// All steps of the window. The gradient also passes through steps of a frozen expert between them.
    #[default]
    Window,
    /// The last K steps.
    Last(usize),
    /// K random steps, drawn for every sample of every training step.
    Random(usize),
    /// K equidistant steps, including the last.
    Uniform(usize),
    /// One random step, drawn for every sample of every training step, from N noisings. The rollout runs to its end
    /// without gradient, its latents are noised N times to the level of that step, and from each copy one step leads to
    /// the data, which is decoded and scored. The loss is the mean over the N copies.
    Renoised(usize),
    /// Two random steps, drawn for every sample of every training step. The gradient passes through two leaps: from the
    /// first step to the noise level of the second, and from there to the end of the rollout. Keys: `discount` (0 to 1,
    /// default 0.3) is the factor of the gradient through the velocity of the second leap. `similarity_floor` (default
    /// 0.1, `null` for none) is the least value that counts as the distance of a leap from the rollout; the loss is
    /// divided by the sum of these distances.
    Leap(Leap),
    /// A short step down from the noise level of one random step, and the same step back up, drawn for every sample of
    /// every training step. The rollout runs to its end without gradient, and its latents are noised again by the noise
    /// that the rollout began with. Because this noise is known, each short step determines a video. The video is
    /// scored under two prompts: the sample's prompt with the word `wanted` before it (default `Real`), and with the
    /// word `unwanted` (default `Oil`). Further keys: `step` is the difference of noise levels (default 0.02).
    /// `denoise_discount` (default `[0.1, 0.25]`) and `inversion_discount` (default `[0.3, 0.01]`) are the excess
    /// weights of the first prompt in the step down and of the second in the step up, at the lowest and at the highest
    /// trained noise level.
    Direct(Direct),
}

/// Options of the steps with known noise (`trained_steps: {direct: ...}`).
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Direct {
    /// Word before the prompt that describes the wanted look.
    pub wanted: String,
    /// Word before the prompt that describes the unwanted look.
    pub unwanted: String,
    /// Difference between the two noise levels of a step.
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))]
    pub step: f64,
    /// Excess weight k of the wanted prompt in steps that denoise: at the lowest and at the highest trained noise
    /// level, linear in between.
    #[schemars(inner(range(min = 0)))]
    pub denoise_discount: [f64; 2],
    /// Excess weight k of the unwanted prompt in steps that invert: at the lowest and at the highest trained noise
    /// level, linear in between.
    #[schemars(inner(range(min = 0)))]
    pub inversion_discount: [f64; 2],
}

impl Default for Direct {
    fn default() -> Self {
        Self {
            wanted: "Real".into(),
            unwanted: "Oil".into(),
            step: 0.02,
            denoise_discount: [0.1, 0.25],
            inversion_discount: [0.3, 0.01],
        }
    }
}

/// Options of the algorithm `reward_fl`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RewardFlConfig {
    /// Denoising steps from noise to data.
    pub num_inference_steps: usize,
    /// The timesteps of the steps before the shift, instead of `num_inference_steps` equidistant ones. Distilled models
    /// list theirs (`[1000, 750, 500, 250]`).
    pub timesteps: Option<Vec<u32>>,
    /// First denoising step with gradient, counted from 0. Earlier steps run without gradient.
    pub mid_timestep: usize,
    /// Last denoising step of the rollout, counted from 0. The latents after it are decoded.
    pub final_timestep: usize,
    /// Which of the steps from `mid_timestep` to `final_timestep` are trained: `window` (all), `{last: K}`,
    /// `{random: K}`, `{uniform: K}`; one random step from several noisings of the finished latents (`{renoised: N}`);
    /// two leaps over the rollout (`{leap: {discount: A}}`); or a short step with known noise (`{direct: {wanted: Real,
    /// unwanted: Oil}}`). Fewer steps take less memory and time; their gradient is a truncation of the whole rollout's
    /// gradient.
    pub trained_steps: TrainedSteps,
    /// Whether the gradient stops between trained steps, with `last`, `random` and `uniform`. The latents that a
    /// velocity is computed from are then constants, so the gradient has no product over steps and does not explode,
    /// however many steps there are.
    pub stop_gradient: bool,
    /// Train only steps whose noise level (timestep / 1000) is at most this. Other steps are constants for the
    /// gradient.
    pub max_timestep_boundary: f64,
    /// Train only steps whose noise level (timestep / 1000) is at least this.
    pub min_timestep_boundary: f64,
    /// Shift of the noise levels. If absent, the shift of the model's official configuration.
    pub shift: Option<f64>,
    /// Sampler of the steps between noise levels. Must be `euler`, the only one that gradients pass through.
    pub sampler: Sampler,
    /// Sampler of evaluations, where nothing is trained: `euler` or `unipc`. If absent, `sampler`.
    pub evaluation_sampler: Option<Sampler>,
    /// Scale s of classifier-free guidance, `v = u + s (c - u)`, with the velocities c under the prompt and u under
    /// `negative_prompt`: one number, or `[high, low]` for the two experts. With 1, for distilled models, only c is
    /// computed.
    pub guidance_scale: GuidanceScale,
    /// The velocities that the gradient passes through: `conditional` (the velocity under the prompt) or `both`.
    pub guidance_gradient: GuidanceGradient,
    /// Negative prompt of classifier-free guidance.
    pub negative_prompt: String,
    /// Mean for the normalisation of the score.
    pub reward_mean: f64,
    /// Standard deviation for the normalisation of the score.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub reward_std: f64,
    /// Weight of the normalised score.
    pub reward_weight: f64,
    /// Weight of the KL divergence from the policy of `kl_reference`. With 0 the KL is computed in evaluations only,
    /// which spares one pass per trained step.
    #[schemars(range(min = 0))]
    pub kl_weight: f64,
    /// The policy that the KL compares with: `start` (where training starts, `model.lora_checkpoint` included: the KL
    /// of the first step is 0) or `base` (without `model.lora_checkpoint`).
    pub kl_reference: KlReference,
    /// Weight of the flow-matching loss on the sample's own clip, at one noise level that is drawn for every sample of
    /// every step. This loss preserves abilities that the reward does not measure. 0 disables it.
    pub data_weight: f64,
    /// Bound on the magnitude of the normalised score. Beyond it the gradient is 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub reward_clip: Option<f64>,
    /// The latents that are decoded if `final_timestep` is not the last step.
    pub early_stop: EarlyStop,
    /// The video or picture that the reward compares with.
    pub reference: Reference,
    /// Number of updates between two measurements of the separate gradient norms of reward and KL, which take a second
    /// rollout; 0 disables them. If absent, 25, or 0 above a billion trained parameters, because a measurement keeps
    /// three copies of the gradient.
    pub gradient_split_every: Option<u64>,
    /// Frames per second of generated videos: the model's (16; 24 for TI2V-5B) or the clip's.
    pub frame_rate: FrameRate,
    /// What happens if a loss or gradient is not finite. A score that is not finite is missing (`reward.on_missing`).
    pub on_nonfinite: OnNonfinite,
}

impl Default for RewardFlConfig {
    fn default() -> Self {
        Self {
            num_inference_steps: 8,
            mid_timestep: 4,
            final_timestep: 7,
            trained_steps: TrainedSteps::Window,
            stop_gradient: false,
            max_timestep_boundary: 1.0,
            min_timestep_boundary: 0.0,
            timesteps: None,
            shift: None,
            sampler: Sampler::Euler,
            evaluation_sampler: None,
            guidance_scale: GuidanceScale::OFF,
            guidance_gradient: GuidanceGradient::Conditional,
            negative_prompt: String::new(),
            reward_mean: 0.54,
            reward_std: 0.16,
            reward_weight: 0.1,
            kl_weight: 1.0,
            kl_reference: KlReference::Start,
            data_weight: 0.0,
            reward_clip: None,
            early_stop: EarlyStop::Decode,
            reference: Reference::Clip,
            gradient_split_every: None,
            frame_rate: FrameRate::Model,
            on_nonfinite: OnNonfinite::Skip,
        }
    }
}

impl RewardFlConfig {
    /// The plan of a training rollout of a model with these facts. Fails on contradicting values; the error names the
    /// key and its range.
    pub fn plan(&self, facts: ScheduleFacts) -> Result<RolloutPlan> {
        if self.sampler != Sampler::Euler {
            let problem = format!(
                "gradients pass through Euler steps only, found {0}; `algo.evaluation_sampler: {0}` takes it where \
                 nothing is trained",
                self.sampler
            );
            return Err(Error::config("algo.sampler", problem));
        }
        let plan = self.trained_steps.restricted(self.plan_with(Sampler::Euler, facts)?, facts)?;
        // Without a KL in the loss, no pass of its reference is needed.
        let reference = if self.kl_weight > 0.0 { plan.reference } else { None };
        Ok(RolloutPlan { adjoint: self.trained_steps.adjoint(self.stop_gradient)?, reference, ..plan })
    }

    /// The plan of an evaluation's rollout. Its KL covers all steps of the window, whichever of them are trained.
    pub fn evaluation_plan(&self, facts: ScheduleFacts) -> Result<RolloutPlan> {
        self.plan_with(self.evaluation_sampler.unwrap_or(self.sampler), facts)
    }

    /// A plan that trains the whole window, by this sampler.
    fn plan_with(&self, sampler: Sampler, facts: ScheduleFacts) -> Result<RolloutPlan> {
        check_ranges("algo", self)?;
        let options = SamplingOptions {
            num_inference_steps: self.num_inference_steps,
            timesteps: self.timesteps.clone(),
            shift: self.shift,
            sampler,
            ..SamplingOptions::default()
        };
        let schedule = options.schedule(facts).in_section("algo")?;
        self.check_steps()?;
        let guidance = Guidance::new(self.guidance_scale, self.guidance_gradient, facts).in_section("algo")?;
        let (mid, last) = (self.mid_timestep, self.final_timestep);
        let mut trained = self.window(&schedule);
        if trained.is_empty() {
            let levels = format!("{:.3} to {:.3}", schedule.sigma(last).0, schedule.sigma(mid).0);
            let problem = format!(
                "no step is left to train: steps {mid} to {last} have timestep / 1000 from {levels}, outside \
                 min_timestep_boundary {} to max_timestep_boundary {}; leave both out to train them all, as the \
                 original does, which ignores them",
                self.min_timestep_boundary, self.max_timestep_boundary
            );
            return Err(Error::config("algo.min_timestep_boundary", problem));
        }
        let acting: Vec<usize> = trained.iter().copied().filter(|i| schedule.is_trained(*i, facts)).collect();
        // Steps before the first one with trainable parameters cannot contribute to the gradient.
        trained.retain(|i| acting.first().is_none_or(|first| i >= first));
        Ok(RolloutPlan {
            schedule,
            sampler,
            guidance,
            trained,
            acting,
            adjoint: Adjoint::Chain,
            first: 0,
            last,
            reference: Some(self.kl_reference.adapter()),
            early_stop: self.early_stop,
        })
    }

    /// Fails unless `mid_timestep` to `final_timestep` are steps of the rollout.
    pub(super) fn check_steps(&self) -> Result<()> {
        let default = Self::default().num_inference_steps;
        check_steps_agree(self.timesteps.as_deref(), self.num_inference_steps, default).in_section("algo")?;
        let (mid, last) = (self.mid_timestep, self.final_timestep);
        let (steps, source) = match &self.timesteps {
            Some(timesteps) => (timesteps.len(), format!("{} timesteps", timesteps.len())),
            None => (self.num_inference_steps, format!("num_inference_steps {}", self.num_inference_steps)),
        };
        if last >= steps {
            let problem = format!("must be a step, 0 to {} with {source}; found {last}", steps.saturating_sub(1));
            return Err(Error::config("algo.final_timestep", problem));
        }
        if mid > last {
            let problem = format!("must be at most final_timestep, {last}; found {mid}");
            return Err(Error::config("algo.mid_timestep", problem));
        }
        Ok(())
    }

    /// Whether training step `step`, counted from 0, measures the gradients of reward and KL separately.
    pub(super) fn measures_gradients_apart(&self, step: u64, parameters: usize) -> bool {
        const DEFAULT_EVERY: u64 = 25;
        const MOST_PARAMETERS: usize = 1_000_000_000;
        let configured = self.gradient_split_every;
        let every = configured.unwrap_or(if parameters > MOST_PARAMETERS { 0 } else { DEFAULT_EVERY });
        // Without a KL there is one gradient.
        let every = if self.kl_weight > 0.0 { every } else { 0 };
        // `step + 1`, because in step 0 the policy usually equals the KL's reference and the KL's gradient is 0.
        every > 0 && (step + 1).is_multiple_of(every)
    }

    /// The steps from `mid_timestep` to `final_timestep` within the boundaries, of both experts.
    pub(super) fn window(&self, schedule: &FlowSchedule) -> Vec<usize> {
        let allowed = self.min_timestep_boundary..=self.max_timestep_boundary;
        (self.mid_timestep..=self.final_timestep).filter(|&i| allowed.contains(&schedule.sigma(i).0)).collect()
    }
}
