//! Options of Flow-GRPO.

use std::ops::Range;

use crate::Sampler;
use roll_core::keys::check_ranges;
use roll_core::{Error, Result, ResultExt, ScheduleFacts};
use roll_step::update::OnNonfinite;

use super::loss::{PolicyLoss, check_threshold};
use super::window::{WindowKind, Windows};
use crate::kl_reference::KlReference;
use crate::policy_gradient::advantages::Spread;
use crate::policy_gradient::clip::ClipRange;
use crate::policy_gradient::levels::acting_steps;
use crate::policy_gradient::sde::{SdeKind, SdeStep};
use crate::policy_gradient::{Method, SeveralRewards};
use crate::sampling::{Guidance, GuidanceGradient, GuidanceScale, Sampling};
use crate::scoring::{FrameRate, Reference};

/// The distance that keeps the policy near the KL's reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlOf {
    /// The squared distance of velocities: the same weight for all steps.
    #[default]
    Velocity,
    /// The KL divergence of a step's Gaussians: the squared distance of their means divided by twice the variance.
    Mean,
}

/// Weight of a step's loss relative to the losses of other steps. Weights have the mean 1 over the trained steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StepWeight {
    /// The same weight for all steps.
    #[default]
    Even,
    /// The inverse scale of the step's own gradient (Flash-GRPO, arXiv:2605.15980).
    Rescaled,
    /// The standard deviation of the step's noise, which measures how far the step explores (TempFlow-GRPO,
    /// arXiv:2508.04324).
    Noise,
}

impl StepWeight {
    /// The weight of a step, before division by the mean weight of the trained steps.
    pub fn of(self, step: &SdeStep) -> f64 {
        match self {
            Self::Even => 1.0,
            Self::Rescaled => step.rescale(),
            Self::Noise => step.std(),
        }
    }
}

/// Options of the algorithm `flow_grpo`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FlowGrpoConfig {
    /// Videos that are generated for each prompt and compared with one another.
    #[schemars(range(min = 2, max = 4096))]
    pub group_size: usize,
    /// Number of these videos to train on. Half of that number are those with the highest advantages, the other half
    /// those with the lowest. If absent, all videos are trained on.
    pub best_of: Option<usize>,
    /// Batch size of the model, in generation and in training: videos of a prompt that it computes together. A larger
    /// batch is faster on small models and takes proportionally more memory.
    #[schemars(range(min = 1))]
    pub at_once: usize,
    /// Whether the videos of a prompt start from the same noise, so that only stochastic steps tell them apart.
    pub same_latent: bool,
    /// Whether the denoising steps before the window are computed once for all videos of a prompt. Needs `same_latent`,
    /// because only videos with the same initial latents have these steps in common.
    pub share_prefix: bool,
    /// Optimizer updates per training step, all on the same videos.
    #[schemars(range(min = 1))]
    pub updates_per_step: usize,
    /// Noise of the stochastic steps: `sde`, `wan`, `dance` or `cps`.
    pub sde: SdeKind,
    /// Level of the noise of the stochastic steps. `wan` does not use it.
    pub eta: f64,
    /// Bound on the standard deviation of a step's noise. If the noise that `sde` and `eta` give is larger, as near
    /// pure noise, it is cut to this. `null`: no bound.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub noise_limit: Option<f64>,
    /// Number of consecutive denoising steps of a video that are stochastic and trained: the window.
    pub window: usize,
    /// Position of the window in `window_range`: `fixed` at the first step, `random` for each prompt of each training
    /// step, or `sliding`.
    pub window_kind: WindowKind,
    /// First and last denoising step that a window may hold, counted from 0. If absent, the first half of the steps at
    /// which trainable parameters act. The last denoising step is never stochastic.
    pub window_range: Option<[usize; 2]>,
    /// Number of denoising steps by which a sliding window moves.
    pub window_stride: usize,
    /// Rounds (training steps) that a sliding window stays in one place.
    pub window_rounds: u64,
    /// Whether the old log-probabilities are recomputed from the velocities of the first update instead of those of the
    /// rollout, at no cost. Ratios then begin at exactly 1, even if generation used another precision or engine than
    /// training.
    pub replay: bool,
    /// How the loss keeps the policy near the one that generated the videos: `clip`, `guard` or `dppo`.
    pub loss: PolicyLoss,
    /// Half-width of the range around 1 that probability ratios are clipped to.
    pub clip_range: f64,
    /// Width of the range above 1. If absent, `clip_range`.
    pub clip_range_high: Option<f64>,
    /// Divergence at which `dppo` begins to leave out samples that have moved in the direction of their advantage.
    pub divergence_threshold: f64,
    /// Weight of each step's loss: `even`, `rescaled` (by the inverse scale of its gradient, as in Flash-GRPO) or
    /// `noise` (by the standard deviation of its noise, as in TempFlow-GRPO).
    pub step_weight: StepWeight,
    /// Divisor of the advantages (per reward, if there are several): the standard deviation of the scores of the
    /// `group`, of the whole `step`, or of the group where it is largest (`largest_group`); `none` does not divide.
    pub advantage_spread: Spread,
    /// Bound on the magnitude of advantages.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub advantage_clip: f64,
    /// How several rewards become one advantage: each reward is normalised `apart`, or their weighted `sum` is
    /// normalised.
    pub several_rewards: SeveralRewards,
    /// Weight of the distance to the policy of `kl_reference`.
    #[schemars(range(min = 0))]
    pub kl_weight: f64,
    /// The policy that the KL compares with, in training and in evaluations: `start` (where training starts,
    /// `model.lora_checkpoint` included: the KL of the first step is 0) or `base` (without `model.lora_checkpoint`).
    pub kl_reference: KlReference,
    /// The distance to the policy of `kl_reference`: `velocity` (squared distance of velocities) or `mean` (divergence
    /// of the step's Gaussians).
    pub kl_of: KlOf,
    /// Weight of the loss of flow matching on the clip of each video's prompt, at one noise level that is drawn anew
    /// for every update. It keeps abilities that the reward does not measure. 0 leaves it out.
    #[schemars(range(min = 0))]
    pub data_weight: f64,
    /// Denoising steps from noise to data.
    pub num_inference_steps: usize,
    /// The timesteps of the denoising steps before the shift, in place of `num_inference_steps` evenly spaced ones.
    /// Distilled models list theirs.
    pub timesteps: Option<Vec<u32>>,
    /// Only noise levels (timestep / 1000) of at most this are trained.
    pub max_timestep_boundary: f64,
    /// Only noise levels (timestep / 1000) of at least this are trained.
    pub min_timestep_boundary: f64,
    /// Shift of the noise levels. If absent, the shift of the model's official configuration.
    pub shift: Option<f64>,
    /// Sampler of evaluations: `euler` or `unipc`. Training uses `euler`, and so do evaluations if this is absent.
    pub evaluation_sampler: Option<Sampler>,
    /// Scale of classifier-free guidance: one number, or `[high, low]` for the two experts; 1 turns guidance off.
    pub guidance_scale: GuidanceScale,
    /// The velocities that the gradient passes through: `conditional` (the velocity under the prompt) or `both`.
    pub guidance_gradient: GuidanceGradient,
    /// Negative prompt, which guidance leads away from.
    pub negative_prompt: String,
    /// The video or picture that the reward compares with.
    pub reference: Reference,
    /// Frames per second of generated videos: the model's (16; 24 for TI2V-5B) or the clip's.
    pub frame_rate: FrameRate,
    /// The reaction to a loss or gradient that is not finite. A score that is not finite is missing
    /// (`reward.on_missing`).
    pub on_nonfinite: OnNonfinite,
}

impl Default for FlowGrpoConfig {
    fn default() -> Self {
        Self {
            group_size: 8,
            best_of: None,
            at_once: 1,
            same_latent: false,
            share_prefix: false,
            updates_per_step: 1,
            sde: SdeKind::Sde,
            eta: 0.7,
            noise_limit: None,
            window: 2,
            window_kind: WindowKind::Random,
            window_range: None,
            window_stride: 1,
            window_rounds: 25,
            replay: false,
            loss: PolicyLoss::Clip,
            clip_range: 1e-4,
            clip_range_high: None,
            divergence_threshold: 1e-5,
            step_weight: StepWeight::Even,
            advantage_spread: Spread::Step,
            advantage_clip: 5.0,
            several_rewards: SeveralRewards::Apart,
            kl_weight: 1e-3,
            kl_reference: KlReference::Start,
            kl_of: KlOf::Velocity,
            data_weight: 0.0,
            num_inference_steps: 12,
            timesteps: None,
            max_timestep_boundary: 1.0,
            min_timestep_boundary: 0.0,
            shift: None,
            evaluation_sampler: None,
            guidance_scale: GuidanceScale::OFF,
            guidance_gradient: GuidanceGradient::Conditional,
            negative_prompt: String::new(),
            reference: Reference::Clip,
            frame_rate: FrameRate::Model,
            on_nonfinite: OnNonfinite::Skip,
        }
    }
}

/// The checked options of a run, with the values that depend on the model's facts.
pub(super) struct FlowGrpoPlan {
    pub(super) sampling: Sampling,
    pub(super) windows: Windows,
    /// The stochastic step for each step of the schedule; `None` for steps that no window may hold.
    pub(super) steps: Vec<Option<SdeStep>>,
    /// Range of probability ratios.
    pub(super) ratio_range: ClipRange,
}

impl FlowGrpoConfig {
    /// The plan of a run of a model with these `facts`. Fails on values that are out of range or contradict one
    /// another; the error names the key.
    pub(super) fn plan(&self, facts: ScheduleFacts) -> Result<FlowGrpoPlan> {
        let shared = self.shared();
        check_ranges("algo", self)?;
        shared.check()?;
        self.check_numbers()?;
        let guidance = Guidance::new(self.guidance_scale, self.guidance_gradient, facts).in_section("algo")?;
        let sampling = Sampling { guidance, ..shared.training(facts, Self::default().num_inference_steps)? };
        shared.evaluation(facts)?;
        let acting = acting_steps(&sampling.schedule, facts, [self.min_timestep_boundary, self.max_timestep_boundary])?;
        // The last step has too little noise for a probability.
        let trainable = acting.into_iter().filter(|i| i + 1 < sampling.schedule.steps());
        let (Some(first), Some(last)) = (trainable.clone().min(), trainable.max()) else {
            return Err(self.too_few_steps(sampling.schedule.steps()));
        };
        let windows = self.windows(first..last + 1)?;
        self.check_prefix(&windows)?;
        let limit = self.noise_limit.unwrap_or(f64::INFINITY);
        let mut steps = vec![None; sampling.schedule.steps()];
        for i in windows.range.clone() {
            let step = SdeStep::limited(self.sde, self.eta, limit, sampling.schedule.sigmas(), i).in_section("algo")?;
            // The mean is `latents_factor x + velocity_factor v`. Noise levels descend, so `velocity_factor` must be
            // negative; otherwise the step cannot be trained.
            if !step.is_stochastic() || step.velocity_factor() >= 0.0 {
                let problem = format!("{} brings no noise that could be trained on into step {i}", self.eta);
                return Err(Error::config("algo.eta", problem));
            }
            if step.latents_factor() <= 0.0 {
                let problem = format!(
                    "{} is more noise than step {i} has room for: nothing of its start is left; `algo.noise_limit` \
                     bounds it",
                    self.eta
                );
                return Err(Error::config("algo.eta", problem));
            }
            steps[i] = Some(step);
        }
        let ratio_range =
            ClipRange::new(self.clip_range, self.clip_range_high.unwrap_or(self.clip_range)).in_section("algo")?;
        Ok(FlowGrpoPlan { sampling, windows, steps, ratio_range })
    }

    /// The windows within `trainable`, the steps that can be trained.
    pub(super) fn windows(&self, trainable: Range<usize>) -> Result<Windows> {
        let (first, last) = (trainable.start, trainable.end.saturating_sub(1));
        let range = match self.window_range {
            // The first half, or as many steps as one window needs.
            None => first..first + trainable.len().div_ceil(2).max(self.window.min(trainable.len())),
            Some([from, to]) if from <= to && (first..=last).contains(&from) && to <= last => from..to + 1,
            Some([from, to]) => {
                let problem =
                    format!("must be two steps within {first} to {last}, which are trained; found {from}, {to}");
                return Err(Error::config("algo.window_range", problem));
            }
        };
        let &Self { window: size, window_kind: kind, window_stride: stride, window_rounds: rounds, .. } = self;
        let windows = Windows { kind, size, range, stride, rounds };
        windows.check().in_section("algo")?;
        Ok(windows)
    }

    /// Fails if `share_prefix` is set and the videos of a prompt have no step in common.
    fn check_prefix(&self, windows: &Windows) -> Result<()> {
        let problem = match (self.share_prefix, self.same_latent) {
            (true, false) => "needs `algo.same_latent: true`: videos with noises of their own have no step in common",
            (true, true) if windows.all_start_at_zero() => {
                "has nothing to share: every window begins at step 0 (`algo.window_range`, `algo.window_kind`)"
            }
            _ => return Ok(()),
        };
        Err(Error::config("algo.share_prefix", problem))
    }

    /// The error if at most the last of `steps` denoising steps is left for training. It names the key to blame.
    fn too_few_steps(&self, steps: usize) -> Error {
        let has_boundary = self.max_timestep_boundary < 1.0 || self.min_timestep_boundary > 0.0;
        // With a single step, a wider range would not help.
        let is_range_to_blame = steps > 1 && has_boundary;
        let key = match (is_range_to_blame, &self.timesteps) {
            (true, _) if self.min_timestep_boundary > 0.0 => "algo.min_timestep_boundary",
            (true, _) => "algo.max_timestep_boundary",
            (false, Some(_)) => "algo.timesteps",
            (false, None) => "algo.num_inference_steps",
        };
        let cure = if is_range_to_blame { "widen the range, or take more steps" } else { "take more steps" };
        let problem = format!(
            "of {steps} denoising steps only the last is left to be trained, and that is never stochastic: {cure}"
        );
        Error::config(key, problem)
    }

    fn check_numbers(&self) -> Result<()> {
        if let Some(limit) = self.noise_limit {
            let is_valid = limit.is_finite() && limit > 0.0;
            if !is_valid {
                return Err(Error::config("algo.noise_limit", format!("must be above 0, found {limit}")));
            }
        }
        self.sde.check(self.eta).in_section("algo")?;
        check_threshold(self.divergence_threshold).in_section("algo")
    }
}
