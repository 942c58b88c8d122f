//! The algorithm: roll out episodes, reward them, estimate advantages, update the policy. Also validation, and the
//! state in checkpoints.

use std::collections::HashSet;
use std::sync::Arc;

use roll_core::{
    Algorithm, Communicator, Environment, Error, Headline, HeadlineFormat, LanguageModel, Model, Noise,
    OwnDataAlgorithm, PICTURE_MARK, Progress, Result, ResultExt, RewardScorer, Samples, SingleRank, StateDict,
    StepContext, StepReport, Tensor, Validation, communicator, flat,
};
use roll_step::ranks::share;
use roll_step::stopwatch::Stopwatch;
use roll_step::update::{self, language};

use super::NAME;
use super::config::{AgenticPpoConfig, Estimator};
use super::critic::{Critic, FitBatch};
use super::engine::Engine;
use super::engine::config::EngineName;
use super::episode::{Ending, Episode};
use super::kl::KlController;
use super::plan::passes;
use super::prepare::{engine_difference, prepare};
use super::report::{episode_metrics, left_out_group, pass_metrics, skipped};
use super::rollout::prefetch::{NextRollout, PrefetchedRollout, Prefetcher, UnplayedRollout};
use super::rollout::worlds::Worlds;
use super::rollout::{EpisodePlan, Writer, check_beginning, play, play_in_parts};
use super::selection::{self, Selection};
use super::updates::train;
use crate::AgentError;

const ROLLOUT: &str = "time/step_rollout";
const LOG_PROBS: &str = "time/step_log_probs";
const TRAIN: &str = "time/step_train";

/// Largest mean difference between log-probabilities of an engine and of the trained model, for the same tokens. With
/// equal weights it is the difference of kernels and precisions, about 0.01 in bf16; another adapter or model is above
/// it at once.
const MAX_DIFFERENCE: f64 = 0.1;

/// The algorithm `agentic_ppo`.
pub struct AgenticPpo {
    config: AgenticPpoConfig,
    learned: LearnedState,
    prefetcher: Prefetcher,
    /// The engine that writes the answers of episodes; `None`: the model itself.
    engine: Option<Engine>,
    /// Whether the engine's log-probabilities were compared with the model's.
    is_compared: bool,
    ranks: Arc<dyn Communicator>,
}

/// The state that is learned besides the model. It is part of checkpoints.
#[derive(serde::Serialize, serde::Deserialize)]
struct LearnedState {
    #[serde(flatten)]
    controller: KlController,
    #[serde(default)]
    critic: Critic,
    /// Number of groups that were refilled so far, by the index of their world.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    refilled: Vec<u64>,
}

/// The algorithm's state in a checkpoint. `L` is [`LearnedState`], or a reference to it for writing.
#[derive(serde::Serialize, serde::Deserialize)]
struct CheckpointedState<L> {
    #[serde(flatten)]
    learned: L,
    /// The next step's episodes of all ranks, if they were prefetched and played to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ahead: Option<PrefetchedRollout>,
    /// What writes the answers of episodes, those of `ahead` among them.
    #[serde(default, skip_serializing_if = "EngineName::is_model")]
    writer: EngineName,
    /// The next step's rollout, if it was under way. The tensor [`POLICY`] of the checkpoint then has the parameters of
    /// the policy that plays it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    under_way: Option<UnderWay>,
}

/// A rollout that a resume plays again.
#[derive(Clone, Copy, serde::Serialize, serde::Deserialize)]
struct UnderWay {
    step: u64,
    /// Number of parameters of the policy that plays it.
    parameters: usize,
}

/// Name of the tensor with the parameters of the policy that plays the rollout that was under way.
const POLICY: &str = "policy_of_rollout";

impl AgenticPpo {
    /// Makes the algorithm from its options.
    pub fn new(config: AgenticPpoConfig) -> Result<Self> {
        config.check()?;
        let controller = KlController::new(config.init_kl_coef, config.target_kl, config.kl_horizon)?;
        let learned = LearnedState { controller, critic: Critic::default(), refilled: Vec::new() };
        let engine = Engine::new(&config.rollout, config.infer_batch_size)?;
        let (prefetcher, ranks) = (Prefetcher::default(), Arc::new(SingleRank));
        Ok(Self { config, learned, prefetcher, engine, is_compared: false, ranks })
    }

    /// Makes this one of several `ranks`, which share episodes and validations.
    pub fn on(self, ranks: Arc<dyn Communicator>) -> Self {
        Self { ranks, ..self }
    }
}

impl OwnDataAlgorithm for AgenticPpo {
    fn open_environments(&mut self, make: &mut dyn FnMut() -> Result<Box<dyn Environment>>) -> Result<()> {
        // Number of environments that this rank plays; at least one group's, for its part of a validation.
        let groups = share(self.ranks.as_ref(), self.config.num_env_groups).len();
        let refilled = if self.config.refill_rounds > 0 { self.config.played_group_size() } else { 0 };
        let needed = (groups * self.config.played_group_size()).max(self.config.val_group_size).max(refilled);
        // Raises this process's limit on open files, because connections and tools need descriptors too.
        roll_external::process::raise_open_files_limit();
        let opened = (0..needed).map(|i| match i {
            // If the first environment cannot be made, its options are wrong: the error needs no number.
            0 => make(),
            i => make().while_doing(|| format!("making environment {} of {needed}", i + 1)),
        });
        self.prefetcher = Prefetcher::new(opened.collect::<Result<_>>()?);
        Ok(())
    }
}

impl Algorithm for AgenticPpo {
    fn samples(self: Box<Self>) -> Samples {
        Samples::Own(self)
    }

    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        language(model, NAME)?;
        update::check_trainable(model)?;
        if self.config.adv_estimator == Estimator::Gae {
            Critic::check(model)?;
        }
        if let Some(reward) = reward {
            tracing::warn!("`{NAME}` is rewarded by its environment: the reward `{}` has no effect", reward.name());
        }
        for warning in self.config.warnings() {
            tracing::warn!("{warning}");
        }
        if self.config.is_asynchronous() {
            language(model, NAME)?.snapshot().while_doing(|| "`algo.async_generation_ratio: 1`".into())?;
        }
        if let Some(engine) = &mut self.engine {
            engine.check(model)?;
        }
        let environments = self.prefetcher.environments();
        if environments.is_empty() {
            return Err(AgentError::NoEnvironment { algorithm: NAME }.into());
        }
        let AgenticPpoConfig { tags, num_groups_partition, val_num_groups_partition, .. } = &self.config;
        let trained = Worlds::new(environments, "algo.tags", tags, num_groups_partition)?;
        let validated = Worlds::new(environments, "algo.val_tags", self.config.validated(), val_num_groups_partition)?;
        let unplayed = [
            trained.unplayed(self.config.num_env_groups, "algo.num_env_groups", "groups"),
            match self.config.val_batch_size {
                0 => None,
                episodes => validated.unplayed(episodes, "algo.val_batch_size", "episodes"),
            },
        ];
        for warning in unplayed.into_iter().flatten() {
            tracing::warn!("{warning}");
        }
        check_beginning(&self.config, language(model, NAME)?, environments[0].as_mut())
    }

    fn headlines(&self) -> Vec<Headline> {
        vec![
            Headline::new("env/success", "success", "Success, fraction of episodes")
                .written(HeadlineFormat::Percent)
                .validated_by("val/env/success", "success", "starts that were not trained on"),
            Headline::new("score/mean", "score", "Mean score of episodes").validated_by(
                "val/score/mean",
                "score",
                "starts that were not trained on",
            ),
            Headline::new("actor/kl_loss", "kl", "KL to the base model")
                .written(HeadlineFormat::Scientific)
                .divergence(),
            Headline::new("actor/loss", "loss", "Loss"),
            Headline::new("actor/entropy", "", "Entropy of tokens"),
            Headline::new("critic/explained_variance", "", "Variance of returns that the critic explains"),
            Headline::new("env/num_actions", "", "Turns of an episode"),
            Headline::new("env/action_is_valid", "", "Valid actions").written(HeadlineFormat::Percent),
            Headline::new("actor/grad_norm", "grad norm", "Gradient norm").written(HeadlineFormat::Scientific),
        ]
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let refilled = self.learned.refilled.clone();
        let report = update::discard_on_error(context, |context| self.update(context));
        match &report {
            // Those of a rollout that is under way stay: it has begun in this step.
            Ok(_) => language(context.model, NAME)?.forget_pictures(),
            Err(_) => {
                self.learned.refilled = refilled;
                self.prefetcher.undo(context.step);
            }
        }
        report
    }

    fn validate(
        &mut self,
        step: u64,
        model: &mut dyn Model,
        noise: &Noise,
        progress: &dyn Progress,
    ) -> Result<Option<Validation>> {
        let wanted = self.config.val_batch_size;
        if wanted == 0 {
            return Ok(None);
        }
        let ranks = self.ranks.clone();
        let own = share(ranks.as_ref(), wanted);
        self.prefetcher.wait(progress)?;
        let plan = EpisodePlan {
            first_group: own.start,
            groups: own.len(),
            all_groups: wanted,
            group_size: self.config.val_group_size,
            temperature: self.config.val_temperature,
            held_out: true,
            ..EpisodePlan::default()
        };
        let mut engine = self.engine_of(model, step)?;
        let engine = engine.as_mut().map(|engine| engine as _);
        let mut writer = Writer { model: language(model, NAME)?, engine };
        let environments = self.prefetcher.environments();
        if environments.is_empty() {
            return Err(AgentError::NoEnvironment { algorithm: NAME }.into());
        }
        let own_episodes = play_in_parts(&self.config, &plan, &mut writer, environments, noise, progress)?;
        let episodes = gathered(ranks.as_ref(), own_episodes)?;
        let metrics = episode_metrics(&episodes, &self.config)
            .into_iter()
            .chain(pass_metrics(&episodes, self.config.val_group_size))
            .map(|(name, value)| (format!("val/{name}"), value));
        let records = self.records(&episodes, step, "validation", language(model, NAME)?)?;
        Ok(Some(Validation { metrics: metrics.collect(), records, losses: Vec::new() }))
    }

    fn state(&self) -> serde_json::Value {
        let (ahead, under_way) = match self.next_rollout() {
            NextRollout::Played(played) => (played, None),
            NextRollout::UnderWay(rollout) => {
                (None, Some(UnderWay { step: rollout.step, parameters: rollout.policy.len() }))
            }
        };
        let state = CheckpointedState { learned: &self.learned, ahead, writer: self.config.rollout.name, under_way };
        serde_json::to_value(state).unwrap_or_default()
    }

    fn load_state(&mut self, state: &serde_json::Value) -> Result<()> {
        let unreadable = |problem: String| Error::Misuse(format!("the state of `{NAME}` cannot be read: {problem}"));
        let CheckpointedState::<LearnedState> { learned, mut ahead, writer, under_way } =
            serde_json::from_value(state.clone()).map_err(|e| unreadable(e.to_string()))?;
        if !learned.critic.has_consistent_moments() {
            return Err(unreadable("the critic's weights and moments have different lengths".into()));
        }
        self.learned = learned;
        let present_writer = self.config.rollout.name;
        if writer != present_writer
            && let Some(rollout) = ahead.take()
        {
            // Their log-probabilities are those of the other writer, and are not corrected as those of this one.
            tracing::warn!(
                "{} episodes of step {} in the checkpoint were written by {writer}, and `algo.rollout.name` is now \
                 {present_writer}: they are dropped, and the step plays its own",
                rollout.episodes.len(),
                rollout.step + 1
            );
        }
        // The checkpoint has the episodes of all ranks; this rank keeps its own.
        let groups = share(self.ranks.as_ref(), self.config.num_env_groups);
        let played = ahead.filter(|_| self.config.is_asynchronous()).map(|mut rollout| {
            rollout.episodes.retain(|episode| groups.contains(&episode.group));
            rollout
        });
        self.prefetcher.restore(match under_way {
            // `load_tensors` replaces the zeros by the parameters.
            Some(UnderWay { step, parameters }) => {
                NextRollout::UnderWay(UnplayedRollout { step, policy: Arc::new(vec![0.0; parameters]) })
            }
            None => NextRollout::Played(played),
        });
        Ok(())
    }

    fn tensors(&self) -> Result<StateDict> {
        let policy =
            self.prefetcher.unplayed().map(|rollout| Tensor::new(rollout.policy.to_vec(), [rollout.policy.len()]));
        Ok(policy.transpose()?.into_iter().map(|policy| (POLICY.to_string(), policy)).collect())
    }

    fn load_tensors(&mut self, tensors: &StateDict) -> Result<()> {
        if let (Some(mut rollout), Some(policy)) = (self.prefetcher.unplayed(), tensors.get(POLICY)) {
            rollout.policy = Arc::new(policy.f32s()?.to_vec());
            let is_needed = self.config.is_asynchronous();
            self.prefetcher.restore(if is_needed { NextRollout::UnderWay(rollout) } else { NextRollout::Played(None) });
        }
        Ok(())
    }
}

impl AgenticPpo {
    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let mut watch = Stopwatch::new(ctx.progress, &[ROLLOUT, LOG_PROBS, TRAIN]);
        ctx.strategy.discard();

        watch.begin(ROLLOUT, None)?;
        let (own_episodes, policy_age) = self.rollout(ctx)?;
        // Every rank gets all episodes, so that normalisation and mini-batches do not depend on the number of ranks.
        let mut played = gathered(ctx.strategy.ranks().all.as_ref(), own_episodes)?;
        let Selection { mut episodes, mut left_out } = selection::chosen(&played, &self.config);
        let (mut drawn, mut filtered) = (self.config.num_env_groups, left_out.len());
        for _ in 0..self.config.refill_rounds {
            if left_out.is_empty() {
                break;
            }
            drawn += left_out.len();
            let refilled = self.refill(ctx, left_out)?;
            let selection = selection::chosen(&refilled, &self.config);
            episodes.extend(selection.episodes);
            left_out = selection.left_out;
            filtered += left_out.len();
            played.extend(refilled);
        }
        let mut report = StepReport { metrics: episode_metrics(&played, &self.config), ..StepReport::default() };
        if self.config.is_asynchronous() {
            report.metrics.insert("env/policy_age".into(), policy_age);
        }
        report.records = self.records(&played, ctx.step + 1, "training", language(ctx.model, NAME)?)?;
        let failed: Vec<&Episode> = played.iter().filter(|episode| !episode.is_usable()).collect();
        report.skipped = failed.iter().map(|episode| skipped(episode)).collect();
        if failed.len() == played.len() && failed.iter().any(|episode| matches!(episode.ending, Ending::NoAnswer(_))) {
            tracing::warn!("the engine wrote no episode of this step, which is left out");
            return Ok(report);
        }
        if let Some(first_failed) = failed.first()
            && failed.len() == played.len()
        {
            let (_, reason) = skipped(first_failed);
            return Err(AgentError::NoEpisode { algorithm: NAME, reason }.into());
        }
        report.metrics.insert("env/groups_filtered".into(), filtered as f64);
        if self.config.refill_rounds > 0 {
            report.metrics.insert("env/groups_drawn".into(), drawn as f64);
        }
        report.skipped.extend(left_out.iter().map(|_| left_out_group()));
        if episodes.is_empty() {
            return Ok(report);
        }

        // Episodes of other ranks, of a checkpoint and of a rollout before the latest step have pictures that this
        // model does not know.
        show_pictures(language(ctx.model, NAME)?, &episodes)?;
        watch.begin(LOG_PROBS, None)?;
        let LearnedState { controller, critic, .. } = &mut self.learned;
        let prepared = prepare(&self.config, controller, critic, ctx, &episodes, &mut report.metrics)?;

        if prepared.whole.response.count() == 0 {
            let reason = "every answer was cut off (`algo.truncated_answers: mask`): raise `algo.max_tokens_per_step`";
            report.skipped.push(("every episode".into(), reason.into()));
            return Ok(report);
        }
        if self.engine.is_some() && policy_age == 0.0 && !self.is_compared {
            let found = engine_difference(&self.config, ctx, &prepared)?;
            if found.is_nan() || found > MAX_DIFFERENCE {
                return Err(AgentError::OtherModel { found, limit: MAX_DIFFERENCE }.into());
            }
            self.is_compared = true;
        }

        watch.begin(TRAIN, None)?;
        if let Some(estimates) = &prepared.estimates {
            let batch = FitBatch { estimates, returns: &prepared.returns, mask: &prepared.whole.response };
            report.applied = critic.fit(&self.config, ctx, &batch, &mut report.metrics)?;
        }
        if prepared.estimates.is_none() || ctx.step >= self.config.critic_warmup {
            report.applied = train(&self.config, ctx, &prepared, &mut report.metrics)?;
        }
        // Only before the second update is the trained policy still the one that wrote the answers.
        let samples = prepared.samples.len();
        let has_one_update = self.config.ppo_epochs == 1 && samples <= self.config.mini_batch(samples);
        let difference = report.metrics.get("actor/train_infer_abs_diff").filter(|found| **found > MAX_DIFFERENCE);
        if let Some(found) = difference
            && self.engine.is_some()
            && has_one_update
        {
            tracing::warn!(
                "the engine's log-probabilities differ from those of the trained model by {found:.3} on average \
                 (`actor/train_infer_abs_diff`): `algo.train_infer_correction` can weigh or leave out such tokens"
            );
        }
        report.metrics.extend(watch.seconds(ctx.strategy.ranks().all.as_ref())?);
        Ok(report)
    }

    /// Returns this rank's episodes of the step, and the number of updates by which the policy that played them is
    /// older than the present one. If rollouts are asynchronous, begins the rollout of the next step.
    fn rollout(&mut self, ctx: &mut StepContext<'_>) -> Result<(Vec<Episode>, f64)> {
        let groups = share(ctx.strategy.ranks().all.as_ref(), self.config.num_env_groups);
        let plan =
            EpisodePlan { step: ctx.step, first_group: groups.start, groups: groups.len(), ..self.training_plan() };
        self.prefetcher.wait(ctx.progress)?;
        let (needed, opened) = (plan.groups * plan.group_size, self.prefetcher.environments().len());
        if opened < needed {
            let problem = format!("`{NAME}` plays {needed} episodes on this rank and has {opened} environments");
            return Err(Error::Misuse(problem));
        }
        // Whether a checkpoint during a rollout saves the parameters of the policy that plays it, from which a resume
        // plays the rollout again. With several ranks, checkpoints wait for the episodes and save these instead.
        let saves_policy = ctx.strategy.ranks().all.world_size() == 1;
        // After a resume: plays the rollout of this step again, by the policy that was playing it.
        if let Some(rollout) = self.prefetcher.unplayed()
            && rollout.step == ctx.step
            && !self.prefetcher.has_rollout()
        {
            // The snapshot copies the parameters, so that the model needs the older ones only until it is made.
            let present = flat::read(ctx.model)?;
            ctx.model.write_parameters(&rollout.policy)?;
            let engine = self.engine_of(ctx.model, ctx.step);
            let policy = language(ctx.model, NAME).and_then(|model| model.snapshot());
            ctx.model.write_parameters(&present)?;
            let saved_policy = saves_policy.then_some(rollout.policy);
            self.prefetcher.begin(&self.config, plan.clone(), policy?, engine?, saved_policy, ctx.noise)?;
            self.prefetcher.wait(ctx.progress)?;
        }
        // The present policy, which plays the next rollout.
        let present = (saves_policy && self.config.is_asynchronous()).then(|| flat::read(ctx.model)).transpose()?;
        let prefetched = self.prefetcher.take(ctx.step)?;
        let mut engine = match prefetched.is_none() || self.config.is_asynchronous() {
            true => self.engine_of(ctx.model, ctx.step)?,
            false => None,
        };
        let model = language(ctx.model, NAME)?;
        let (episodes, policy_age) = match prefetched {
            Some(prefetched) => (prefetched, 1.0),
            None => {
                let mut writer = Writer { model: &mut *model, engine: engine.as_mut().map(|engine| engine as _) };
                let environments = self.prefetcher.environments();
                (play(&self.config, plan.clone(), &mut writer, environments, ctx.noise, ctx.progress)?, 0.0)
            }
        };
        if self.config.is_asynchronous() {
            let next = EpisodePlan { step: ctx.step + 1, ..plan };
            let saved_policy = present.map(Arc::new);
            self.prefetcher.begin(&self.config, next, model.snapshot()?, engine, saved_policy, ctx.noise)?;
        }
        Ok((episodes, policy_age))
    }

    /// The plan of all training rollouts, without a step and its groups.
    fn training_plan(&self) -> EpisodePlan {
        EpisodePlan {
            all_groups: self.config.num_env_groups,
            refilled: self.learned.refilled.clone(),
            group_size: self.config.played_group_size(),
            temperature: self.config.temperature,
            ..EpisodePlan::default()
        }
    }

    /// Plays new groups in place of the groups `replaced`, and returns the episodes of all ranks.
    fn refill(&mut self, ctx: &mut StepContext<'_>, replaced: Vec<usize>) -> Result<Vec<Episode>> {
        let ranks = ctx.strategy.ranks().all.clone();
        let own = share(ranks.as_ref(), replaced.len());
        let plan =
            EpisodePlan { step: ctx.step, first_group: own.start, groups: own.len(), replaced, ..self.training_plan() };
        let mut engine = self.engine_of(ctx.model, ctx.step)?;
        let environments = self.prefetcher.environments();
        let AgenticPpoConfig { tags, num_groups_partition, .. } = &self.config;
        let worlds = Worlds::new(environments, "algo.tags", tags, num_groups_partition)?;
        let mut writer =
            Writer { model: language(ctx.model, NAME)?, engine: engine.as_mut().map(|engine| engine as _) };
        let own_episodes = play_in_parts(&self.config, &plan, &mut writer, environments, ctx.noise, ctx.progress)?;
        plan.count_refilled(&worlds, &mut self.learned.refilled);
        gathered(ranks.as_ref(), own_episodes)
    }

    /// The engine with the adapter of the present policy, which has `version` updates; `None` if the model itself
    /// writes the answers.
    fn engine_of(&mut self, model: &mut dyn Model, version: u64) -> Result<Option<Engine>> {
        if let Some(engine) = &mut self.engine {
            engine.load(model, version, self.ranks.as_ref())?;
        }
        Ok(self.engine.clone())
    }

    /// The next step's rollout for a checkpoint, with the episodes of all ranks. With several ranks, waits for the
    /// rollout of this rank.
    fn next_rollout(&self) -> NextRollout {
        if !self.config.is_asynchronous() {
            return NextRollout::Played(None);
        }
        let played = match self.prefetcher.next_rollout() {
            NextRollout::Played(played) => played,
            under_way => return under_way,
        };
        let step = played.as_ref().map(|played| played.step);
        match gathered(self.ranks.as_ref(), played.map(|played| played.episodes).unwrap_or_default()) {
            Ok(episodes) => NextRollout::Played(step.map(|step| PrefetchedRollout { step, episodes })),
            Err(error) => {
                tracing::warn!("the checkpoint has no episodes of the next step, which are played again: {error}");
                NextRollout::Played(None)
            }
        }
    }

    /// The records of episodes for `trajectories.jsonl`. The first record with tokens also has its whole text.
    fn records(
        &self,
        episodes: &[Episode],
        step: u64,
        kind: &str,
        model: &dyn LanguageModel,
    ) -> Result<Vec<serde_json::Value>> {
        let saved = &episodes[..episodes.len().min(self.config.saved_trajectories)];
        let mut records = saved.iter().map(|episode| episode.record(step, kind)).collect::<Result<Vec<_>>>()?;
        if let Some(i) = saved.iter().position(|episode| !episode.tokens.is_empty()) {
            records[i]["text"] = saved[i].texts(model)?;
        }
        Ok(records)
    }
}

/// Makes the pictures of `episodes` known to the model, so that it can evaluate their tokens.
fn show_pictures(model: &dyn LanguageModel, episodes: &[Episode]) -> Result<()> {
    let mark = String::from(PICTURE_MARK);
    let mut shown = HashSet::new();
    for picture in episodes.iter().flat_map(|episode| &episode.pictures) {
        if shown.insert((picture.size(), picture.pixels().as_bytes())) {
            model.tokenize_with_pictures(&mark, std::slice::from_ref(picture))?;
        }
    }
    Ok(())
}

/// The episodes of all ranks, in the order of the ranks.
fn gathered(ranks: &dyn Communicator, own_episodes: Vec<Episode>) -> Result<Vec<Episode>> {
    if ranks.world_size() == 1 {
        return Ok(own_episodes);
    }
    Ok(communicator::join(ranks, &own_episodes)?.concat())
}

roll_core::register! {
    Algorithm, NAME, AgenticPpoConfig,
    "Trains a language model as an agent that acts in a text environment",
    |mut config: AgenticPpoConfig, context| {
        for tool in &mut config.tools {
            let configured = tool.directory.take();
            tool.directory = Some(configured.map_or_else(|| context.base_dir.clone(), |d| context.resolve(d)));
        }
        config.rollout.adapters = config.rollout.adapters.map(|directory| context.resolve(directory));
        Ok(AgenticPpo::new(config)?.on(context.ranks.clone()))
    },
    plan: passes,
}
