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

/// The loss that advantages weigh.
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
    /// Weight of minus the score of the video that the velocity at a noised copy points at; 0, for rewards without a
    /// gradient, leaves it out. The `reward_weight` of Reward-FL over its `reward_std` is such a weight: 0.625 by its
    /// defaults.
    #[schemars(range(min = 0))]
    pub weight: f64,
    /// Only copies of at most this noise level (timestep / 1000) are scored: nearly pure noise points at a blur.
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
    /// Number of these videos to train on, half of them those with the highest advantages and half those with the lowest;
    /// all of them when absent.
    pub best_of: Option<usize>,
    /// Videos of a prompt, and later samples of a regression, that the model computes together. More are faster on
    /// small models, and take more memory in proportion.
    #[schemars(range(min = 1))]
    pub at_once: usize,
    /// Optimizer updates of a step, each at noise levels of its own.
    #[schemars(range(min = 1))]
    pub updates_per_step: usize,
    /// Noise levels at which each video is trained in an update, spread evenly over those of the sampler.
    #[schemars(range(min = 1))]
    pub levels_per_video: usize,
    /// Divisor of the advantages, of each of several rewards apart: the deviation of the scores of the `group`, of the
    /// `step`, of the `largest_group`, or `none`.
    pub advantage_spread: Spread,
    /// Bound on advantages.
    pub advantage_clip: f64,
    /// Which advantages count: `all`, `positive_only`, `negative_only`, `one_only` (1 or 0) or `binary` (their sign);
    /// of the loss `nft`.
    pub advantage_mode: AdvantageMode,
    /// Treatment of several rewards: each normalised `apart`, or their weighted `sum`.
    pub several_rewards: SeveralRewards,
    /// Distance of the implicit good and bad policies from the old one, in the loss `nft`.
    pub beta: f64,
    /// Range that ratios are clipped to, around 1; of the loss `awm`.
    pub clip_range: f64,
    /// Substitute for the log-probability, in the loss `awm`: `uniform`, `t`, `t_squared`, `huber` or `ghuber`.
    pub matching: Matching,
    /// Weight of the squared distance of velocities to those of the policy of `kl_reference`.
    #[schemars(range(min = 0))]
    pub kl_weight: f64,
    /// The policy that the KL compares with, in training and in evaluations: `start` (where training starts,
    /// `model.lora_checkpoint` included: the KL of the first step is 0) or `base` (without `model.lora_checkpoint`).
    pub kl_reference: KlReference,
    /// Weight of the same distance to the old policy.
    #[schemars(range(min = 0))]
    pub old_kl_weight: f64,
    /// Weight of the loss of flow matching on the clip of each video's prompt, at one noise level that is drawn anew
    /// for every update. It keeps abilities that the reward does not measure. 0 leaves it out.
    #[schemars(range(min = 0))]
    pub data_weight: f64,
    /// The gradient of the reward beside the regression, for rewards that have one.
    pub reward_gradient: RewardGradient,
    /// How the policy that generates follows the one in training: `follow` (it is the same at every step), `ramp` (ever
    /// more slowly, up to half of it stays) or `late_ramp` (from step 75 on, nearly all of it stays).
    pub old_policy: OldDecay,
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
    /// The step from one noise level to the next: `euler` or `unipc`.
    pub sampler: Sampler,
    /// The same in evaluations; as `sampler` when absent.
    pub evaluation_sampler: Option<Sampler>,
    /// Scale of classifier-free guidance in videos, one number or `[high, low]`; 1 turns it off. The regression has
    /// none.
    pub guidance_scale: GuidanceScale,
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

/// What follows from the options and a model's facts.
pub(super) struct NftPlan {
    pub(super) sampling: Sampling,
    /// The steps of the schedule whose noise levels are trained, ascending.
    pub(super) steps: Vec<usize>,
    pub(super) nft: Nft,
    pub(super) clip: ClipRange,
}

impl DiffusionNftConfig {
    /// Fails on values that are out of range or contradict one another, naming the key.
    pub(super) fn plan(&self, facts: ScheduleFacts) -> Result<NftPlan> {
        let shared = self.shared();
        check_ranges("algo", self)?;
        shared.check()?;
        let sampling = shared.training(facts, Self::default().num_inference_steps)?;
        shared.evaluation(facts)?;
        let schedule = &sampling.schedule;
        let steps = acting_steps(schedule, facts, [self.min_timestep_boundary, self.max_timestep_boundary])?;
        let nft = Nft { beta: self.beta, bound: self.advantage_clip, mode: self.advantage_mode };
        nft.check().in_section("algo")?;
        let clip = ClipRange::symmetric(self.clip_range).in_section("algo")?;
        Ok(NftPlan { sampling, steps, nft, clip })
    }

    /// Whether velocities of the KL's reference are needed.
    pub(super) fn needs_reference(&self) -> bool {
        self.kl_weight > 0.0
    }
}
