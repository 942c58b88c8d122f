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

/// The distance by which the policy is kept near the KL's reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlOf {
    /// The squared distance of velocities, which weighs all steps alike.
    #[default]
    Velocity,
    /// The divergence of the Gaussians of a step: the squared distance of means over twice the variance.
    Mean,
}

/// How the loss of a step is weighed against those of other steps. Weights have the mean 1 over the trained steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StepWeight {
    /// All alike.
    #[default]
    Even,
    /// The inverse scale of the step's own gradient (Flash-GRPO, arXiv:2605.15980).
    Rescaled,
    /// The standard deviation of the step's noise, by which it explores (TempFlow-GRPO, arXiv:2508.04324).
    Noise,
}

impl StepWeight {
    /// The weight of a step, before it is divided by the mean.
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
    /// Number of these videos to train on, half of them those with the highest advantages and half those with the lowest;
    /// all of them when absent.
    pub best_of: Option<usize>,
    /// Videos of a prompt that the model computes together, in generation and training alike. More are faster on small
    /// models, and take more memory in proportion.
    #[schemars(range(min = 1))]
    pub at_once: usize,
    /// Whether the videos of a prompt start from the same noise, so that only stochastic steps tell them apart.
    pub same_latent: bool,
    /// Whether the steps before the window are computed once for all videos of a prompt, which begin with the same
    /// latents there. Needs `same_latent`.
    pub share_prefix: bool,
    /// Optimizer updates of a step, all on the same videos.
    #[schemars(range(min = 1))]
    pub updates_per_step: usize,
    /// Noise of the stochastic steps: `sde`, `wan`, `dance` or `cps`.
    pub sde: SdeKind,
    /// The level of that noise; `wan` has none.
    pub eta: f64,
    /// Bound on the standard deviation of a step's noise; where `sde` and `eta` ask for more, which they do near pure
    /// noise, the step has this much. If it is `null`, there is no bound.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub noise_limit: Option<f64>,
    /// Stochastic steps of a video: those that are trained.
    pub window: usize,
    /// Where they stand: `fixed` at the first step of their range, `random` for each prompt of each round, or
    /// `sliding`.
    pub window_kind: WindowKind,
    /// First and last step of the range of windows, from 0; when absent the first half of the steps at which trainable
    /// parameters act. The last step of all is never stochastic.
    pub window_range: Option<[usize; 2]>,
    /// Steps that a sliding window moves by.
    pub window_stride: usize,
    /// Rounds that it stays.
    pub window_rounds: u64,
    /// Whether the velocities of the first update take the place of those that the rollout was made by. Where
    /// generation computes otherwise than training does, in another precision or on another engine, ratios then begin
    /// at exactly 1; it costs nothing.
    pub replay: bool,
    /// Bound that holds the policy near the one that sampled: `clip`, `guard` or `dppo`.
    pub loss: PolicyLoss,
    /// Range that ratios are clipped to, around 1.
    pub clip_range: f64,
    /// The same above 1, where it differs.
    pub clip_range_high: Option<f64>,
    /// Divergence from which `dppo` leaves out a sample that has moved along its advantage.
    pub divergence_threshold: f64,
    /// Weight of each step's loss: `even`, `rescaled` (by the inverse scale of its gradient, as in Flash-GRPO) or `noise`
    /// (by the standard deviation of its noise, as in TempFlow-GRPO).
    pub step_weight: StepWeight,
    /// Divisor of the advantages, of each of several rewards apart: the deviation of the scores of the `group`, of the
    /// `step`, of the `largest_group`, or `none`.
    pub advantage_spread: Spread,
    /// Bound on advantages.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub advantage_clip: f64,
    /// Treatment of several rewards: each normalised `apart`, or their weighted `sum`.
    pub several_rewards: SeveralRewards,
    /// Weight of the distance to the policy of `kl_reference`.
    #[schemars(range(min = 0))]
    pub kl_weight: f64,
    /// The policy that the KL compares with, in training and in evaluations: `start` (where training starts,
    /// `model.lora_checkpoint` included: the KL of the first step is 0) or `base` (without `model.lora_checkpoint`).
    pub kl_reference: KlReference,
    /// The distance: `velocity` or `mean`.
    pub kl_of: KlOf,
    /// Weight of the loss of flow matching on the clip of each video's prompt, at one noise level that is drawn anew
    /// for every update. It keeps abilities that the reward does not measure. 0 leaves it out.
    #[schemars(range(min = 0))]
    pub data_weight: f64,
    /// Denoising steps from noise to data.
    pub num_inference_steps: usize,
    /// The timesteps of these steps themselves, before the shift, as distilled models list theirs.
    pub timesteps: Option<Vec<u32>>,
    /// Only noise levels (timestep / 1000) of at most this are trained.
    pub max_timestep_boundary: f64,
    /// Only noise levels of at least this are trained.
    pub min_timestep_boundary: f64,
    /// Shift of the noise levels; when absent that of the model's official configuration.
    pub shift: Option<f64>,
    /// The step of evaluations from one noise level to the next: `euler` or `unipc`. Training takes Euler steps.
    pub evaluation_sampler: Option<Sampler>,
    /// Scale of classifier-free guidance, one number or `[high, low]`; 1 turns it off.
    pub guidance_scale: GuidanceScale,
    /// The velocities that the gradient passes through: `conditional`, that under the prompt alone, or `both`.
    pub guidance_gradient: GuidanceGradient,
    /// Negative prompt, which guidance leads away from.
    pub negative_prompt: String,
    /// The video or picture that the reward compares with.
    pub reference: Reference,
    /// Frames a second of generated videos: those that the model was made with, or the clip's.
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

/// What follows from the options and a model's facts.
pub(super) struct FlowGrpoPlan {
    pub(super) sampling: Sampling,
    pub(super) windows: Windows,
    /// The stochastic step at each position of the schedule that a window may hold.
    pub(super) steps: Vec<Option<SdeStep>>,
    pub(super) clip: ClipRange,
}

impl FlowGrpoConfig {
    /// Fails on values that are out of range or contradict one another, naming the key.
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
        let acting = acting.into_iter().filter(|i| i + 1 < sampling.schedule.steps());
        let (Some(first), Some(last)) = (acting.clone().min(), acting.max()) else {
            return Err(self.too_few_steps(sampling.schedule.steps()));
        };
        let windows = self.windows(first..last + 1)?;
        self.check_prefix(&windows)?;
        let limit = self.noise_limit.unwrap_or(f64::INFINITY);
        let mut steps = vec![None; sampling.schedule.steps()];
        for i in windows.range.clone() {
            let step = SdeStep::limited(self.sde, self.eta, limit, sampling.schedule.sigmas(), i).in_section("algo")?;
            if !step.is_stochastic() || step.of_velocity() >= 0.0 {
                let problem = format!("{} brings no noise that could be trained on into step {i}", self.eta);
                return Err(Error::config("algo.eta", problem));
            }
            if step.of_latents() <= 0.0 {
                let problem = format!(
                    "{} is more noise than step {i} has room for: nothing of its start is left; `algo.noise_limit` \
                     bounds it",
                    self.eta
                );
                return Err(Error::config("algo.eta", problem));
            }
            steps[i] = Some(step);
        }
        let clip =
            ClipRange::new(self.clip_range, self.clip_range_high.unwrap_or(self.clip_range)).in_section("algo")?;
        Ok(FlowGrpoPlan { sampling, windows, steps, clip })
    }

    /// The windows within the steps `trained`.
    pub(super) fn windows(&self, trained: Range<usize>) -> Result<Windows> {
        let key = |problem: String| Err(Error::config("algo.window_range", problem));
        let (first, last) = (trained.start, trained.end.saturating_sub(1));
        let range = match self.window_range {
            None => first..first + trained.len().div_ceil(2).max(self.window.min(trained.len())),
            Some([from, to]) if from <= to && (first..=last).contains(&from) && to <= last => from..to + 1,
            Some([from, to]) => {
                return key(format!(
                    "must be two steps within {first} to {last}, which are trained; found {from}, {to}"
                ));
            }
        };
        let &Self { window: size, window_kind: kind, window_stride: stride, window_rounds: rounds, .. } = self;
        let windows = Windows { kind, size, range, stride, rounds };
        windows.check().in_section("algo")?;
        Ok(windows)
    }

    /// Fails if no prefix can be shared.
    fn check_prefix(&self, windows: &Windows) -> Result<()> {
        let problem = match (self.share_prefix, self.same_latent) {
            (true, false) => "needs `algo.same_latent: true`: videos with noises of their own have no step in common",
            (true, true) if windows.mean_start() == 0.0 => {
                "has nothing to share: every window begins at step 0 (`algo.window_range`, `algo.window_kind`)"
            }
            _ => return Ok(()),
        };
        Err(Error::config("algo.share_prefix", problem))
    }

    /// No step but the last is left to be stochastic: the error names the key that leaves so few of `steps`.
    fn too_few_steps(&self, steps: usize) -> Error {
        let bounded = steps > 1 && (self.max_timestep_boundary < 1.0 || self.min_timestep_boundary > 0.0);
        let key = match (bounded, &self.timesteps) {
            (true, _) if self.min_timestep_boundary > 0.0 => "algo.min_timestep_boundary",
            (true, _) => "algo.max_timestep_boundary",
            (false, Some(_)) => "algo.timesteps",
            (false, None) => "algo.num_inference_steps",
        };
        let cure = if bounded { "widen the range, or take more steps" } else { "take more steps" };
        let problem = format!(
            "of {steps} denoising steps only the last is left to be trained, and that is never stochastic: {cure}"
        );
        Error::config(key, problem)
    }

    fn check_numbers(&self) -> Result<()> {
        if let Some(limit) = self.noise_limit.filter(|limit| !(limit.is_finite() && *limit > 0.0)) {
            return Err(Error::config("algo.noise_limit", format!("must be above 0, found {limit}")));
        }
        self.sde.check(self.eta).in_section("algo")?;
        check_threshold(self.divergence_threshold).in_section("algo")
    }
}
