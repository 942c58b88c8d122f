//! Options of agentic PPO, under the reference's names where it has them.

use roll_core::keys::check_ranges;
use roll_core::{Error, Result, ResultExt, Sampling};
use roll_step::update::OnNonfinite;

use super::engine::config::RolloutConfig;
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
    /// All groups.
    #[default]
    All,
    /// Groups whose episodes differ in their scores. From a group of equal scores, estimators that compare episodes
    /// within a group learn nothing.
    Varied,
}

/// What becomes of answers that were cut off at `max_tokens_per_step` or `sequence_length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TruncatedAnswers {
    /// They are trained on as all others.
    #[default]
    Keep,
    /// Samples with such an answer are not trained on. Their rewards still count where rewards are compared.
    Mask,
}

/// How advantages come from rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// Generalized advantage estimation from the values of a critic (<https://arxiv.org/abs/1506.02438>).
    Gae,
    /// Discounted sum of the rewards from each token on.
    Reinforce,
    /// As `reinforce`, with rewards normalised within groups of equal starts (<https://arxiv.org/abs/2402.03300>).
    #[default]
    Grpo,
    /// As `grpo`, but each turn is a sample. Its reward is the reward of the episode, normalised within groups of equal
    /// starts, plus the return of the turn, normalised among turns of equal observation
    /// (<https://arxiv.org/abs/2505.10978>).
    Gigpo,
    /// Each turn is a sample with its own discounted return.
    StepReinforce,
    /// One return per turn of the agent, the same for all its tokens: the normalised reward of the episode, discounted
    /// by turns.
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
    /// Groups of episodes per step. The episodes of a group have the same start.
    #[schemars(range(min = 1))]
    pub num_env_groups: usize,
    /// Episodes per group.
    #[schemars(range(min = 1))]
    pub group_size: usize,
    /// Additional episodes per group, which replace episodes whose environment failed.
    pub group_size_redundancy: usize,
    /// Which groups are trained on.
    pub group_filter: GroupFilter,
    /// Most further rounds of episodes in a step, in which new groups take the place of those that `group_filter: varied`
    /// leaves out (dynamic sampling, <https://arxiv.org/abs/2503.14476>). 0: the step trains on fewer groups.
    pub refill_rounds: usize,
    /// Worlds that are trained on, if the environment has several (`mixed`); empty: all of them.
    pub tags: Vec<String>,
    /// Share of the groups for each world of `tags`, relative to the other shares; empty: equal shares.
    pub num_groups_partition: Vec<usize>,
    /// Most turns of an episode.
    #[schemars(range(min = 1))]
    pub max_actions_per_traj: usize,
    /// Most tokens of an answer.
    #[schemars(range(min = 1))]
    pub max_tokens_per_step: usize,
    /// Maximum number of tokens of a conversation, prompts included. A conversation is an episode or, with
    /// `history_length`, a turn.
    #[schemars(range(min = 1))]
    pub sequence_length: usize,
    /// Temperature of the answers.
    pub temperature: f64,
    /// Which log-probabilities of generation `train_infer_correction` compares with those of training, which are at
    /// temperature 1 over all tokens.
    pub infer_log_probs: InferLogProbs,
    /// What writes the answers: the model itself, or another engine that serves it.
    pub rollout: RolloutConfig,
    /// Nucleus mass of the answers.
    pub top_p: f64,
    /// Number of likeliest tokens that answers are drawn from; 0: all tokens.
    pub top_k: usize,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// What becomes of answers that were cut off at `max_tokens_per_step` or `sequence_length`.
    pub truncated_answers: TruncatedAnswers,
    /// Subtracted from the reward of an answer that was cut off, in training; 0: nothing.
    #[schemars(range(min = 0))]
    pub length_penalty: f64,
    /// Number of tokens before `max_tokens_per_step` over which the penalty grows from 0 to `length_penalty` (soft
    /// overlong punishment, <https://arxiv.org/abs/2503.14476>). 0: only answers that were cut off are punished.
    pub length_penalty_tokens: usize,
    /// 1: while a step trains, the policy before the update plays the episodes of the next step. The ratios of the loss
    /// are then relative to the log-probabilities of that policy. 0: episodes are played between updates.
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
    /// and `{env_instruction}`. Without `{env_instruction}`, the environment's instructions precede the message.
    pub agent_template: String,
    /// Number of turns that the agent sees, the current one included. Each turn then has a prompt of its own, in which
    /// `{history}` of `agent_template` is replaced by the turns before it, with answers without thoughts. `null`: the
    /// agent reads its whole conversation. Needs an estimator whose samples are turns (`gigpo`, `step_reinforce`).
    #[schemars(range(min = 1))]
    pub history_length: Option<usize>,
    /// Commands that the agent may call before it answers: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    pub tools: Vec<ToolOptions>,
    /// Maximum number of tool calls in a turn. An answer after them goes to the environment, even if it has further
    /// calls.
    #[schemars(range(min = 1))]
    pub max_tool_calls: usize,

    // Validation
    /// Starts of a validation, which training never sees, each with `val_group_size` episodes; 0 turns validation off.
    pub val_batch_size: usize,
    /// Episodes of each start in a validation, for `val/env/pass@k`: the chance that at least one of k answers is right.
    /// Needs a `val_temperature` above 0, unless it is 1.
    #[schemars(range(min = 1))]
    pub val_group_size: usize,
    /// Temperature of the answers in a validation.
    #[schemars(range(min = 0))]
    pub val_temperature: f64,
    /// Worlds that are validated on; empty: the worlds of `tags`.
    pub val_tags: Vec<String>,
    /// Share of the episodes for each world of `val_tags`, relative to the other shares; empty: equal shares.
    pub val_num_groups_partition: Vec<usize>,
    /// Number of episodes of each step, and of each validation, that are written to `trajectories.jsonl`.
    pub saved_trajectories: usize,

    // Rewards and advantages
    /// How advantages come from rewards. `gae` trains a critic beside the policy: a linear head on hidden states.
    pub adv_estimator: Estimator,
    /// Steps at the beginning in which `gae` trains the critic alone.
    pub critic_warmup: u64,
    /// Learning rate of the critic.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub critic_learning_rate: f64,
    /// Updates of the critic in a step, each with all samples of the step.
    #[schemars(range(min = 1))]
    pub critic_epochs: usize,
    /// Bound on the change of the critic's values in a step: if that makes the loss larger, the loss clips a value to
    /// this distance from its value before the step. `null`: no bound.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub value_clip: Option<f64>,
    /// Discount factor of rewards, per token; with `agentic_reinforce`, per turn.
    #[schemars(range(min = 0, max = 1))]
    pub gamma: f64,
    /// Decay (lambda) of generalized advantage estimation.
    #[schemars(range(min = 0, max = 1))]
    pub lambd: f64,
    /// Discount factor of the returns of turns, per turn (`gigpo`, `step_reinforce`).
    #[schemars(range(min = 0, max = 1))]
    pub step_reward_gamma: f64,
    /// Weight of the episode's reward in `gigpo`.
    pub episode_reward_weight: f64,
    /// Weight of the turn's return in `gigpo`.
    pub step_reward_weight: f64,
    /// How rewards are normalised.
    pub reward_normalization: RewardNormalization,
    /// Bound on the magnitude of normalised rewards, and of the rewards of tokens after the KL is subtracted; `null`:
    /// none.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub reward_clip: Option<f64>,
    /// Bound on the magnitude of advantages; `null`: none.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub advantage_clip: Option<f64>,
    /// Whether the advantages of a step's tokens are whitened (mean 0, variance 1).
    pub whiten_advantages: bool,
    /// Whether the rewards of a step's tokens are whitened (mean 0, variance 1).
    pub whiten_rewards: bool,
    /// Whether the KL to the reference policy is subtracted from the rewards of tokens.
    pub add_token_level_kl: bool,
    /// Estimate of the KL that is subtracted from rewards.
    pub kl_penalty: KlEstimate,
    /// Initial coefficient of the KL that is subtracted from rewards.
    pub init_kl_coef: f64,
    /// Target of the KL, towards which the coefficient is adapted; `null` keeps the coefficient.
    pub target_kl: Option<f64>,
    /// Number of samples over which the coefficient changes by at most 20 %.
    pub kl_horizon: f64,

    // Updates
    /// Passes over the episodes of a step.
    #[schemars(range(min = 1))]
    pub ppo_epochs: usize,
    /// Samples per update, over all ranks; 0: all samples of the step.
    pub mini_batch_size: usize,
    /// Episodes whose gradient is computed at once. If each turn is a sample, the turns of an episode are evaluated
    /// together.
    #[schemars(range(min = 1))]
    pub micro_batch_size: usize,
    /// Whether old log-probabilities are computed before the updates even if the step has only one update, which does
    /// not need them.
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
            refill_rounds: 0,
            tags: Vec::new(),
            num_groups_partition: Vec::new(),
            max_actions_per_traj: 10,
            max_tokens_per_step: 64,
            sequence_length: 2048,
            temperature: 1.0,
            infer_log_probs: InferLogProbs::Drawn,
            rollout: RolloutConfig::default(),
            top_p: 1.0,
            top_k: 0,
            stop: Vec::new(),
            truncated_answers: TruncatedAnswers::Keep,
            length_penalty: 0.0,
            length_penalty_tokens: 0,
            async_generation_ratio: 0,
            infer_batch_size: 256,
            max_env_step_concurrent: 256,
            agent_system_template: SYSTEM.into(),
            agent_template: TURN.into(),
            history_length: None,
            tools: Vec::new(),
            max_tool_calls: 4,
            val_batch_size: 100,
            val_group_size: 1,
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
        if self.refill_rounds > 0 && self.is_asynchronous() {
            let problem = "`algo.async_generation_ratio: 1` plays the next step's episodes while groups would be refilled: \
                           expected 0 for one of the two";
            return Err(Error::config("algo.refill_rounds", problem));
        }
        if self.length_penalty_tokens > self.max_tokens_per_step {
            let problem = format!(
                "expected at most `algo.max_tokens_per_step: {}`, found {}",
                self.max_tokens_per_step, self.length_penalty_tokens
            );
            return Err(Error::config("algo.length_penalty_tokens", problem));
        }
        if self.val_group_size > 1 && self.val_temperature == 0.0 {
            let problem = "the likeliest tokens are the same in every episode of a start: expected 1, or \
                           `algo.val_temperature` above 0 (1.0, say)";
            return Err(Error::config("algo.val_group_size", problem));
        }
        if self.has_no_signal() {
            let problem = "the reward of an episode is compared with those of its group, and of one episode alone that \
                           leaves 0: nothing would be learned. Expected at least 2, or \
                           `algo.reward_normalization.grouping: batch`";
            return Err(Error::config("algo.group_size", problem));
        }
        self.rollout.check()?;
        let changes_distribution = self.temperature != 1.0 || self.top_p < 1.0 || self.top_k > 0;
        let reads_drawn = self.loss.train_infer_correction.is_active() && self.infer_log_probs == InferLogProbs::Drawn;
        if self.rollout.is_external() && changes_distribution && reads_drawn {
            let problem = "an engine reports log-probabilities before temperature, `top_p` and `top_k` alone: expected \
                           `raw`, found `drawn` with `algo.train_infer_correction` and another distribution to draw from";
            return Err(Error::config("algo.infer_log_probs", problem));
        }
        worlds::check_shares("num_groups_partition", &self.tags, &self.num_groups_partition)?;
        worlds::check_shares("val_num_groups_partition", self.validated(), &self.val_num_groups_partition)?;
        self.loss.check()
    }

    /// Whether every normalised reward is 0, because it is the only reward of its group.
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

    /// Whether a rollout is played while the previous step trains.
    pub fn is_asynchronous(&self) -> bool {
        self.async_generation_ratio > 0
    }

    /// Number of episodes that a group plays, with the additional ones.
    pub fn played_group_size(&self) -> usize {
        self.group_size + self.group_size_redundancy
    }

    /// What is subtracted from the reward of an answer of `tokens` tokens.
    pub fn penalty(&self, tokens: usize, is_truncated: bool) -> f64 {
        let free = self.max_tokens_per_step - self.length_penalty_tokens.min(self.max_tokens_per_step);
        let share = match (is_truncated, self.length_penalty_tokens) {
            (true, _) => 1.0,
            (false, 0) => 0.0,
            (false, most) => (tokens.saturating_sub(free) as f64 / most as f64).min(1.0),
        };
        self.length_penalty * share
    }

    /// Notes for the user on options whose effect may surprise.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let corrects_drawn =
            self.loss.train_infer_correction.is_active() && self.infer_log_probs == InferLogProbs::Drawn;
        // Name, value, and whether it changes the distribution that tokens are drawn from.
        let sampling_options = [
            ("temperature", self.temperature, self.temperature != 1.0),
            ("top_p", self.top_p, self.top_p < 1.0),
            ("top_k", self.top_k as f64, self.top_k > 0),
        ];
        let changes: Vec<String> = sampling_options
            .into_iter()
            .filter(|(_, _, changes)| *changes)
            .map(|(name, value, _)| format!("`algo.{name}: {value}`"))
            .collect();
        if corrects_drawn && !changes.is_empty() {
            warnings.push(format!(
                "with {} answers are drawn from another distribution than the one that is trained, and \
                 `algo.train_infer_correction` corrects for that difference too (`algo.infer_log_probs: raw` does \
                 not): its ratios are far from 1 with equal kernels",
                changes.join(", ")
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

    /// The options of a call that draws answers. `limits` has the maximum number of new tokens of each prompt,
    /// `numbers` the number of its episode, which keys the random draws.
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
            is_last_turn: false,
        }
    }
}
