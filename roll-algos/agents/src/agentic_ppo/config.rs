//! Options of agentic PPO, under the reference's names where it has them.

use roll_core::keys::check_ranges;
use roll_core::{Error, Result, ResultExt, Sampling};
use roll_step::update::OnNonfinite;

use super::kl::KlEstimate;
use super::loss::LossConfig;
use super::rewards::{Grouping, NormalizationMethod, RewardNormalization, StatisticScope};
use super::rollout::template::{SYSTEM, TURN};
use super::rollout::worlds;
use super::tools::{ToolOptions, Tools};

/// Log-probabilities of generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InferLogProbs {
    /// Log-probabilities under the distribution that tokens were drawn from: after temperature, `top_k` and `top_p`.
    /// They differ from those of training in two ways: in the distribution and in the kernels.
    #[default]
    Drawn,
    /// Log-probabilities at temperature 1 over all tokens: only the difference between the kernels remains.
    Raw,
}

/// Which groups of episodes are trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GroupFilter {
    /// All.
    #[default]
    All,
    /// Groups whose episodes differ in their scores: estimators that compare within a group learn nothing from others.
    Varied,
}

/// How advantages come from rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// Generalized advantage estimation from the values of a critic (<https://arxiv.org/abs/1506.02438>).
    Gae,
    /// Discounted sum of the rewards from each token on.
    Reinforce,
    /// As `reinforce`, of rewards normalised within groups of equal starts (<https://arxiv.org/abs/2402.03300>).
    #[default]
    Grpo,
    /// As `grpo`, each turn a sample with rewards of episode and of equal states (<https://arxiv.org/abs/2505.10978>).
    Gigpo,
    /// Each turn a sample with its own discounted return.
    StepReinforce,
    /// One return per turn of the agent, the same for all its tokens: the normalised reward of the episode, discounted by
    /// turns.
    AgenticReinforce,
}

impl Estimator {
    /// Whether each turn is a sample of its own.
    pub fn is_stepwise(self) -> bool {
        matches!(self, Self::Gigpo | Self::StepReinforce)
    }
}

/// Options of the algorithm `agentic_ppo`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct AgenticPpoConfig {
    // Rollouts
    /// Groups of episodes per step; a group shares its start.
    #[schemars(range(min = 1))]
    pub num_env_groups: usize,
    /// Episodes per group.
    #[schemars(range(min = 1))]
    pub group_size: usize,
    /// Additional episodes per group: they replace episodes whose environment failed.
    pub group_size_redundancy: usize,
    /// Which groups are trained on.
    pub group_filter: GroupFilter,
    /// Worlds that are trained on, of an environment that has several (`mixed`); empty: all of them.
    pub tags: Vec<String>,
    /// Shares of the groups that the worlds of `tags` get; empty: equal ones.
    pub num_groups_partition: Vec<usize>,
    /// Most turns of an episode.
    #[schemars(range(min = 1))]
    pub max_actions_per_traj: usize,
    /// Most tokens of an answer.
    #[schemars(range(min = 1))]
    pub max_tokens_per_step: usize,
    /// Most tokens of a conversation, prompts included: of an episode, or of a turn with `history_length`.
    #[schemars(range(min = 1))]
    pub sequence_length: usize,
    /// Temperature of the answers.
    pub temperature: f64,
    /// Which log-probabilities of generation `train_infer_correction` compares with those of training, which are at
    /// temperature 1 over all tokens.
    pub infer_log_probs: InferLogProbs,
    /// Nucleus mass of the answers.
    pub top_p: f64,
    /// Likeliest tokens that answers are drawn from; 0 is all.
    pub top_k: usize,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// 1: while a step trains, the policy before the update plays the episodes of the next step; the ratios of the
    /// loss are to its log-probabilities. 0: episodes are played between updates.
    #[schemars(range(max = 1))]
    pub async_generation_ratio: usize,
    /// Most prompts that are continued at once.
    #[schemars(range(min = 1))]
    pub infer_batch_size: usize,
    /// Most environments, or tools, that work at the same time on a rank, each on a thread of its own.
    #[schemars(range(min = 1))]
    pub max_env_step_concurrent: usize,
    /// System message; the beginning of the first user message if the chat template refuses system messages.
    pub agent_system_template: String,
    /// Message of a turn. Replaced are `{observation}` (also `{current_observation}`), `{turn_idx}` (also
    /// `{current_step}`), `{step_count}`, `{actions_left}`, `{max_response_length}`, `{history}`, `{history_length}`
    /// and `{env_instruction}`; without the last, the environment's instructions precede the message.
    pub agent_template: String,
    /// Number of turns that the agent sees, the current one included: each is a prompt of its own, in which `{history}`
    /// of `agent_template` are those before it, their answers without thoughts. `null`: the agent reads its whole conversation. Only estimators whose
    /// samples are turns can have it (`gigpo`, `step_reinforce`).
    #[schemars(range(min = 1))]
    pub history_length: Option<usize>,
    /// Commands that the agent may call before it answers: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    pub tools: Vec<ToolOptions>,
    /// Most calls of a turn; an answer after them goes to the environment in any case.
    #[schemars(range(min = 1))]
    pub max_tool_calls: usize,

    // Validation
    /// Episodes of a validation, from starts that training never sees; 0 turns validation off.
    pub val_batch_size: usize,
    /// Temperature of its answers.
    #[schemars(range(min = 0))]
    pub val_temperature: f64,
    /// As `tags`, of a validation; empty: those of `tags`.
    pub val_tags: Vec<String>,
    /// As `num_groups_partition`, of `val_tags`.
    pub val_num_groups_partition: Vec<usize>,
    /// Episodes of each step, and of each validation, that are written to `trajectories.jsonl`.
    pub saved_trajectories: usize,

    // Rewards and advantages
    /// How advantages come from rewards. `gae` trains a critic beside the policy: a linear head on hidden states.
    pub adv_estimator: Estimator,
    /// Steps at the beginning in which `gae` trains the critic alone.
    pub critic_warmup: u64,
    /// Learning rate of the critic.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub critic_learning_rate: f64,
    /// Updates of the critic in a step, each by all samples.
    #[schemars(range(min = 1))]
    pub critic_epochs: usize,
    /// The critic's loss counts a value as no further than this from its value before the step; `null`: as it is.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub value_clip: Option<f64>,
    /// Discount.
    #[schemars(range(min = 0, max = 1))]
    pub gamma: f64,
    /// Decay of generalized advantage estimation.
    #[schemars(range(min = 0, max = 1))]
    pub lambd: f64,
    /// Discount of the returns of turns (`gigpo`, `step_reinforce`).
    #[schemars(range(min = 0, max = 1))]
    pub step_reward_gamma: f64,
    /// Weight of the episode's reward in `gigpo`.
    pub episode_reward_weight: f64,
    /// Weight of the turn's reward in `gigpo`.
    pub step_reward_weight: f64,
    /// How rewards are normalised.
    pub reward_normalization: RewardNormalization,
    /// Bound on the magnitude of normalised rewards.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub reward_clip: Option<f64>,
    /// Bound on the magnitude of advantages.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub advantage_clip: Option<f64>,
    /// Whether advantages are whitened.
    pub whiten_advantages: bool,
    /// Whether rewards are whitened.
    pub whiten_rewards: bool,
    /// Whether the KL to the reference policy is subtracted from the rewards of tokens.
    pub add_token_level_kl: bool,
    /// How that KL is estimated.
    pub kl_penalty: KlEstimate,
    /// Initial coefficient of that KL.
    pub init_kl_coef: f64,
    /// KL that the coefficient is adapted to; `null` keeps the coefficient.
    pub target_kl: Option<f64>,
    /// Number of samples over which the coefficient is adapted.
    pub kl_horizon: f64,

    // Updates
    /// Passes over the episodes of a step.
    #[schemars(range(min = 1))]
    pub ppo_epochs: usize,
    /// Samples per update, over all ranks; 0 is all.
    pub mini_batch_size: usize,
    /// Episodes whose gradient is computed at once; their turns, where each is a sample, are evaluated together.
    #[schemars(range(min = 1))]
    pub micro_batch_size: usize,
    /// Compute old log-probabilities before the update even when one update needs none.
    pub enable_old_logprobs_recompute: bool,
    /// The policy loss.
    #[serde(flatten)]
    pub loss: LossConfig,
    /// Reaction to a loss or gradient that is not finite.
    pub on_nonfinite: OnNonfinite,
}

impl Default for AgenticPpoConfig {
    fn default() -> Self {
        Self {
            num_env_groups: 8,
            group_size: 8,
            group_size_redundancy: 0,
            group_filter: GroupFilter::All,
            tags: Vec::new(),
            num_groups_partition: Vec::new(),
            max_actions_per_traj: 10,
            max_tokens_per_step: 64,
            sequence_length: 2048,
            temperature: 1.0,
            infer_log_probs: InferLogProbs::Drawn,
            top_p: 1.0,
            top_k: 0,
            stop: Vec::new(),
            async_generation_ratio: 0,
            infer_batch_size: 256,
            max_env_step_concurrent: 256,
            agent_system_template: SYSTEM.into(),
            agent_template: TURN.into(),
            history_length: None,
            tools: Vec::new(),
            max_tool_calls: 4,
            val_batch_size: 100,
            val_temperature: 0.0,
            val_tags: Vec::new(),
            val_num_groups_partition: Vec::new(),
            saved_trajectories: 16,
            adv_estimator: Estimator::Grpo,
            critic_warmup: 0,
            critic_learning_rate: 0.01,
            critic_epochs: 20,
            value_clip: None,
            gamma: 1.0,
            lambd: 0.95,
            step_reward_gamma: 0.95,
            episode_reward_weight: 1.0,
            step_reward_weight: 1.0,
            reward_normalization: RewardNormalization {
                grouping: Grouping::TrajGroupId,
                method: NormalizationMethod::MeanStd,
                ..RewardNormalization::default()
            },
            reward_clip: None,
            advantage_clip: None,
            whiten_advantages: false,
            whiten_rewards: false,
            add_token_level_kl: false,
            kl_penalty: KlEstimate::Kl,
            init_kl_coef: 0.2,
            target_kl: None,
            kl_horizon: 10_000.0,
            ppo_epochs: 1,
            mini_batch_size: 0,
            micro_batch_size: 8,
            enable_old_logprobs_recompute: false,
            loss: LossConfig::default(),
            on_nonfinite: OnNonfinite::Skip,
        }
    }
}

impl AgenticPpoConfig {
    /// Fails on values that cannot be trained with.
    pub fn check(&self) -> Result<()> {
        check_ranges("algo", self)?;
        self.sampling(self.temperature, Vec::new(), 0, Vec::new()).check().in_section("algo")?;
        Tools::new(&self.tools)?;
        if self.history_length.is_some() && !self.adv_estimator.is_stepwise() {
            let problem = "turns with prompts of their own are samples of their own: `algo.adv_estimator` must be \
                           `gigpo` or `step_reinforce`";
            return Err(Error::config("algo.history_length", problem));
        }
        if self.has_no_signal() {
            let problem = "the reward of an episode is compared with those of its group, and of one episode alone that \
                           leaves 0: nothing would be learned. Expected at least 2, or \
                           `algo.reward_normalization.grouping: batch`";
            return Err(Error::config("algo.group_size", problem));
        }
        worlds::check_shares("num_groups_partition", &self.tags, &self.num_groups_partition)?;
        worlds::check_shares("val_num_groups_partition", self.validated(), &self.val_num_groups_partition)?;
        self.loss.check()
    }

    /// Whether every normalised reward is 0, as each is the only one of its group.
    fn has_no_signal(&self) -> bool {
        let normalization = &self.reward_normalization;
        let resolved = normalization.resolved();
        // The reward of a group of one is its mean, and a standard deviation makes it 0 as well.
        let becomes_zero = resolved.std.is_some() || resolved.mean == Some(StatisticScope::Group);
        // The turns of an episode are samples of one group.
        let has_one_sample = self.group_size == 1 && !self.adv_estimator.is_stepwise();
        has_one_sample && normalization.grouping == Grouping::TrajGroupId && becomes_zero
    }

    /// Tags of the worlds that are validated on.
    pub fn validated(&self) -> &[String] {
        if self.val_tags.is_empty() { &self.tags } else { &self.val_tags }
    }

    /// Whether a rollout is played while the step before it trains.
    pub fn is_asynchronous(&self) -> bool {
        self.async_generation_ratio > 0
    }

    /// Episodes that a group plays.
    pub fn played_group_size(&self) -> usize {
        self.group_size + self.group_size_redundancy
    }

    /// Notes for the user on options whose effect may surprise.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let corrects = self.loss.train_infer_correction.is_active() && self.infer_log_probs == InferLogProbs::Drawn;
        let drawn = [
            ("temperature", self.temperature, self.temperature != 1.0),
            ("top_p", self.top_p, self.top_p < 1.0),
            ("top_k", self.top_k as f64, self.top_k > 0),
        ];
        let drawn: Vec<String> = drawn
            .into_iter()
            .filter(|(_, _, differs)| *differs)
            .map(|(name, value, _)| format!("`algo.{name}: {value}`"))
            .collect();
        if corrects && !drawn.is_empty() {
            warnings.push(format!(
                "with {} answers are drawn from another distribution than the one that is trained, and \
                 `algo.train_infer_correction` corrects for that difference too (`algo.infer_log_probs: raw` does not): its ratios are far from 1 with equal \
                 kernels",
                drawn.join(", ")
            ));
        }
        warnings
    }

    /// Samples per update, over all ranks, of a step that has `samples`.
    pub fn mini_batch(&self, samples: usize) -> usize {
        match self.mini_batch_size {
            0 => samples.max(1),
            size => size,
        }
    }

    /// Whether the log-probabilities of the reference policy are needed.
    pub fn needs_reference(&self) -> bool {
        self.loss.use_kl_loss || self.add_token_level_kl
    }

    /// How answers are drawn, those of the episodes `numbers` with at most `limits` tokens each.
    pub fn sampling(&self, temperature: f64, limits: Vec<usize>, seed: u64, numbers: Vec<u64>) -> Sampling {
        Sampling {
            temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            max_new_tokens: self.max_tokens_per_step,
            limits,
            stop: self.stop.clone(),
            seed,
            numbers,
        }
    }
}
