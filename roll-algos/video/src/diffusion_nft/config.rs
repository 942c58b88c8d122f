//! Options of DiffusionNFT.

use crate::Sampler;
use roll_core::keys::check_ranges;
use roll_core::{Result, ResultExt, ScheduleFacts};
use roll_step::update::OnNonfinite;

use super::loss::awm::Matching;
use super::loss::nft::{AdvantageMode, Nft};
use crate::kl_reference::KlReference;
use crate::policy_gradient::advantages::Spread;
use crate::policy_gradient::clip::ClipRange;
use crate::policy_gradient::levels::acting_steps;
use crate::policy_gradient::old_policy::OldDecay;
use crate::policy_gradient::{Method, SeveralRewards};
use crate::sampling::{GuidanceScale, Sampling};
use crate::scoring::{FrameRate, Reference};

/// The loss on noised copies of videos, weighted by advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Regression {
    /// DiffusionNFT: towards good samples, and away from bad ones by a mirrored policy.
    #[default]
    Nft,
    /// Advantage Weighted Matching: flow matching on the samples in place of a log-probability, clipped as PPO clips.
    Awm,
}

/// How much the gradient of the reward counts, and where.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RewardGradient {
    /// Weight of a loss term that is minus a score. The score is that of the video that the velocity at a noised copy
    /// points at. 0 leaves the term out; a reward without a gradient needs 0. In Reward-FL the corresponding weight is
    /// `reward_weight / reward_std`, 0.625 by default.
    #[schemars(range(min = 0))]
    pub weight: f64,
    /// Only copies of at most this noise level (timestep / 1000) are scored, because from nearly pure noise the
    /// velocity points at a blur.
    pub max_timestep_boundary: f64,
}

impl Default for RewardGradient {
    fn default() -> Self {
        Self { weight: 0.0, max_timestep_boundary: 1.0 }
    }
}

/// Options of the algorithm `diffusion_nft`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DiffusionNftConfig {
    /// The loss: `nft` or `awm`.
    pub loss: Regression,
    /// Videos that are generated for each prompt and compared with one another.
    #[schemars(range(min = 2, max = 4096))]
    pub group_size: usize,
    /// Number of these videos to train on. Half of that number are those with the highest advantages, the other half
    /// those with the lowest. If absent, all videos are trained on.
    pub best_of: Option<usize>,
    /// Batch size of the model: videos of a prompt in generation, noised copies of videos in training. A larger batch
    /// is faster on small models and takes proportionally more memory.
    #[schemars(range(min = 1))]
    pub at_once: usize,
    /// Optimizer updates per training step. Each update draws noise levels of its own.
    #[schemars(range(min = 1))]
    pub updates_per_step: usize,
    /// Noise levels at which each update trains each video, spread evenly over the sampler's noise levels.
    #[schemars(range(min = 1))]
    pub levels_per_video: usize,
    /// Divisor of the advantages (per reward, if there are several): the standard deviation of the scores of the
    /// `group`, of the whole `step`, or of the group where it is largest (`largest_group`); `none` does not divide.
    pub advantage_spread: Spread,
    /// Bound on the magnitude of advantages.
    pub advantage_clip: f64,
    /// Use of advantages in the loss `nft`: `all`, `positive_only`, `negative_only`, `one_only` (1 if positive,
    /// otherwise 0) or `binary` (the sign).
    pub advantage_mode: AdvantageMode,
    /// How several rewards become one advantage: each reward is normalised `apart`, or their weighted `sum` is
    /// normalised.
    pub several_rewards: SeveralRewards,
    /// Distance of the implicit good and bad policies from the old policy, in the loss `nft`.
    pub beta: f64,
    /// Half-width of the range around 1 that probability ratios are clipped to, in the loss `awm`.
    pub clip_range: f64,
    /// Substitute for the log-probability, in the loss `awm`: `uniform`, `t`, `t_squared`, `huber` or `ghuber`.
    pub matching: Matching,
    /// Weight of the squared distance between the velocities of the policy and those of `kl_reference`.
    #[schemars(range(min = 0))]
    pub kl_weight: f64,
    /// The policy that the KL compares with, in training and in evaluations: `start` (where training starts,
    /// `model.lora_checkpoint` included: the KL of the first step is 0) or `base` (without `model.lora_checkpoint`).
    pub kl_reference: KlReference,
    /// Weight of the squared distance between the velocities of the policy and those of the old policy.
    #[schemars(range(min = 0))]
    pub old_kl_weight: f64,
    /// Weight of the loss of flow matching on the clip of each video's prompt, at one noise level that is drawn anew
    /// for every update. It keeps abilities that the reward does not measure. 0 leaves it out.
    #[schemars(range(min = 0))]
    pub data_weight: f64,
    /// The gradient of the reward in addition to the regression, for differentiable rewards.
    pub reward_gradient: RewardGradient,
    /// How the old policy, which generates, follows the policy in training after each step: `follow` (it becomes
    /// equal), `ramp` (it keeps a growing part of itself, up to half) or `late_ramp` (it becomes equal before step 75,
    /// and later keeps a growing part of itself, up to nearly all).
    pub old_policy: OldDecay,
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
    /// Sampler of the steps between noise levels: `euler` or `unipc`.
    pub sampler: Sampler,
    /// Sampler of evaluations: `euler` or `unipc`. If absent, `sampler`.
    pub evaluation_sampler: Option<Sampler>,
    /// Scale of classifier-free guidance in generated videos: one number, or `[high, low]` for the two experts; 1 turns
    /// guidance off. The regression uses no guidance.
    pub guidance_scale: GuidanceScale,
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

impl Default for DiffusionNftConfig {
    fn default() -> Self {
        Self {
            loss: Regression::Nft,
            group_size: 8,
            best_of: None,
            at_once: 1,
            updates_per_step: 1,
            levels_per_video: 2,
            advantage_spread: Spread::Step,
            advantage_clip: 5.0,
            advantage_mode: AdvantageMode::All,
            several_rewards: SeveralRewards::Apart,
            beta: 1.0,
            clip_range: 0.05,
            matching: Matching::Ghuber,
            kl_weight: 1e-3,
            kl_reference: KlReference::Start,
            old_kl_weight: 0.0,
            data_weight: 0.0,
            reward_gradient: RewardGradient::default(),
            old_policy: OldDecay::Ramp,
            num_inference_steps: 12,
            timesteps: None,
            max_timestep_boundary: 1.0,
            min_timestep_boundary: 0.0,
            shift: None,
            sampler: Sampler::Euler,
            evaluation_sampler: None,
            guidance_scale: GuidanceScale::OFF,
            negative_prompt: String::new(),
            reference: Reference::Clip,
            frame_rate: FrameRate::Model,
            on_nonfinite: OnNonfinite::Skip,
        }
    }
}

/// The checked options of a run, with the values that depend on the model's facts.
pub(super) struct NftPlan {
    pub(super) sampling: Sampling,
    /// The steps of the schedule whose noise levels are trained, ascending.
    pub(super) steps: Vec<usize>,
    pub(super) nft: Nft,
    /// Range of probability ratios in the loss `awm`.
    pub(super) ratio_range: ClipRange,
}

impl DiffusionNftConfig {
    /// The plan of a run of a model with these `facts`. Fails on values that are out of range or contradict one
    /// another; the error names the key.
    pub(super) fn plan(&self, facts: ScheduleFacts) -> Result<NftPlan> {
        let shared = self.shared();
        check_ranges("algo", self)?;
        shared.check()?;
        let sampling = shared.training(facts, Self::default().num_inference_steps)?;
        // Only checked here: each evaluation plan asks for it again.
        shared.evaluation(facts)?;
        let schedule = &sampling.schedule;
        let steps = acting_steps(schedule, facts, [self.min_timestep_boundary, self.max_timestep_boundary])?;
        let nft = Nft { beta: self.beta, bound: self.advantage_clip, mode: self.advantage_mode };
        nft.check().in_section("algo")?;
        let ratio_range = ClipRange::symmetric(self.clip_range).in_section("algo")?;
        Ok(NftPlan { sampling, steps, nft, ratio_range })
    }

    /// Whether velocities of the KL's reference are needed.
    pub(super) fn needs_reference(&self) -> bool {
        self.kl_weight > 0.0
    }
}
