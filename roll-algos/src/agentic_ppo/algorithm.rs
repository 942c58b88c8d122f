//! The algorithm: roll out, reward, estimate advantages, update.

use std::collections::BTreeMap;

use roll_core::registry::{default_options, parse_options};
use roll_core::{
    Adapter, Algorithm, Communicator, DataSource, Environment, Error, Factory, Grad, Headline, HeadlineFormat,
    LanguageModel, Model, Noise, Progress, Registration, Result, ResultExt, RewardScorer, StepContext, StepReport,
    Tensor, Validation, communicator,
};

use super::advantages::{Estimator, estimate};
use super::aggregate::Totals;
use super::batch::{Batch, Evaluated, Sample, by_episodes, samples, width};
use super::config::Config;
use super::grid::{Grid, Mask};
use super::kl::KlController;
use super::loss::{LossInputs, policy_loss};
use super::metrics::Joined;
use super::rewards::{self, Grouping, KlReward};
use super::rollout::{Ending, Episode, Plan, play};
use crate::AlgorithmError;
use crate::stopwatch::Stopwatch;
use crate::update::{self, OnNonfinite};

const NAME: &str = "agentic_ppo";

const ROLLOUT: &str = "time/step_rollout";
const LOG_PROBS: &str = "time/step_log_probs";
const TRAIN: &str = "time/step_train";

type Metrics = BTreeMap<String, f64>;

/// The algorithm `agentic_ppo`.
pub struct AgenticPpo {
    config: Config,
    controller: KlController,
    environments: Vec<Box<dyn Environment>>,
}

/// A step's samples with everything that the loss needs, `[B, L - 1]` each.
struct Prepared {
    samples: Vec<Sample>,
    whole: Batch,
    advantages: Grid,
    old_log_probs: Option<Grid>,
    ref_log_probs: Option<Grid>,
    scores: Vec<f64>,
}

impl AgenticPpo {
    /// With these options.
    pub fn new(config: Config) -> Result<Self> {
        config.check()?;
        let controller = KlController::new(config.init_kl_coef, config.target_kl, config.kl_horizon)?;
        Ok(Self { config, controller, environments: Vec::new() })
    }

    /// Its options.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

fn language(model: &mut dyn Model) -> Result<&mut dyn LanguageModel> {
    Ok(model.as_language().ok_or(AlgorithmError::NotLanguage { algorithm: NAME })?)
}

impl Algorithm for AgenticPpo {
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        language(model)?;
        if model.parameter_count() == 0 {
            return Err(AlgorithmError::NothingToTrain.into());
        }
        if let Some(reward) = reward {
            tracing::warn!("`{NAME}` is rewarded by its environment: the reward `{}` has no effect", reward.name());
        }
        if self.environments.is_empty() {
            return Err(AlgorithmError::NoEnvironment { algorithm: NAME }.into());
        }
        Ok(())
    }

    fn data_source(&self) -> DataSource {
        DataSource::Own { steps_per_epoch: None }
    }

    fn open_environments(&mut self, make: &mut dyn FnMut() -> Result<Box<dyn Environment>>) -> Result<()> {
        let needed = self.config.num_env_groups * self.config.group_size;
        self.environments = (0..needed).map(|_| make()).collect::<Result<_>>()?;
        Ok(())
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
            Headline::new("actor/kl_loss", "kl", "KL to the base model").written(HeadlineFormat::Scientific),
            Headline::new("actor/loss", "loss", "Loss"),
            Headline::new("actor/entropy", "", "Entropy of tokens"),
            Headline::new("env/num_actions", "", "Turns of an episode"),
            Headline::new("env/action_is_valid", "", "Valid actions").written(HeadlineFormat::Percent),
            Headline::new("actor/grad_norm", "grad norm", "Gradient norm").written(HeadlineFormat::Scientific),
        ]
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let report = self.update(context);
        if report.is_err() {
            // Whoever catches the error finds no half-summed gradient.
            update::forget(context)?;
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
        let model = language(model)?;
        let mut episodes = Vec::new();
        // As many at once as there are environments.
        while episodes.len() < wanted {
            let plan = Plan {
                step: 0,
                first_group: episodes.len(),
                groups: self.environments.len().min(wanted - episodes.len()),
                group_size: 1,
                temperature: self.config.val_temperature,
                held_out: true,
            };
            episodes.extend(play(&self.config, plan, model, &mut self.environments, noise, progress)?);
        }
        let metrics = episode_metrics(&episodes).into_iter().map(|(name, value)| (format!("val/{name}"), value));
        Ok(Some(Validation { metrics: metrics.collect(), records: self.records(&episodes, step, "validation") }))
    }

    fn state(&self) -> serde_json::Value {
        serde_json::to_value(&self.controller).unwrap_or_default()
    }

    fn load_state(&mut self, state: &serde_json::Value) -> Result<()> {
        let loaded = serde_json::from_value(state.clone());
        self.controller = loaded.map_err(|e| Error::Misuse(format!("the state of `{NAME}` cannot be read: {e}")))?;
        Ok(())
    }
}

impl AgenticPpo {
    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let mut watch = Stopwatch::new(ctx.progress, &[ROLLOUT, LOG_PROBS, TRAIN]);
        ctx.strategy.discard();

        watch.begin(ROLLOUT, None)?;
        let groups = share(ctx, self.config.num_env_groups);
        let plan = Plan {
            step: ctx.step,
            first_group: groups.start,
            groups: groups.len(),
            group_size: self.config.group_size,
            temperature: self.config.temperature,
            held_out: false,
        };
        let model = language(ctx.model)?;
        let own = play(&self.config, plan, model, &mut self.environments, ctx.noise, ctx.progress)?;
        // Every rank knows all episodes: normalisation and mini-batches are those of one rank alone.
        let played = match ctx.strategy.communicator() {
            ranks if ranks.world_size() == 1 => own,
            ranks => communicator::join(ranks, &own)?.concat(),
        };
        let mut report = StepReport { metrics: episode_metrics(&played), ..StepReport::default() };
        report.records = self.records(&played, ctx.step + 1, "training");
        let (episodes, failed): (Vec<Episode>, Vec<Episode>) = played.into_iter().partition(Episode::is_usable);
        report.skipped = failed.iter().map(skipped).collect();
        if let (true, Some(failed)) = (episodes.is_empty(), failed.first()) {
            return Err(AlgorithmError::NoEpisode { algorithm: NAME, reason: skipped(failed).1 }.into());
        }

        watch.begin(LOG_PROBS, None)?;
        let prepared = self.prepare(ctx, &episodes, &mut report.metrics)?;

        watch.begin(TRAIN, None)?;
        report.applied = self.train(ctx, &prepared, &mut report.metrics)?;
        let seconds = update::slowest(ctx.strategy.communicator(), watch.seconds())?;
        report.metrics.extend(seconds.into_iter().map(|(name, seconds)| (name.to_string(), seconds)));
        Ok(report)
    }

    /// What is kept of `episodes` for people.
    fn records(&self, episodes: &[Episode], step: u64, kind: &str) -> Vec<serde_json::Value> {
        episodes.iter().take(self.config.saved_trajectories).map(|e| e.record(step, kind)).collect()
    }

    /// Rewards, log-probabilities and advantages of all samples.
    fn prepare(&mut self, ctx: &mut StepContext<'_>, episodes: &[Episode], metrics: &mut Metrics) -> Result<Prepared> {
        let config = self.config.clone();
        let samples = samples(episodes, config.adv_estimator.is_stepwise());
        let width = width(&samples);
        let whole = Batch::new(&samples.iter().collect::<Vec<_>>(), width)?;
        let scores: Vec<f64> = samples.iter().map(|s| episodes[s.episode].score()).collect();

        let updates = config.ppo_epochs * samples.len().max(1).div_ceil(self.mini_batch(samples.len()));
        let recompute = updates > 1 || config.enable_old_logprobs_recompute || config.add_token_level_kl;
        let old_log_probs = match recompute {
            true => Some(self.log_probs(ctx, &samples, width, Adapter::On)?),
            false => None,
        };
        let ref_log_probs = match config.needs_reference() {
            true => Some(self.log_probs(ctx, &samples, width, Adapter::Off)?),
            false => None,
        };

        let mut token_rewards = self.token_rewards(episodes, &samples, &whole, metrics);
        let reference = ref_log_probs.as_ref().filter(|_| config.add_token_level_kl);
        if let (Some(old), Some(reference)) = (&old_log_probs, reference) {
            let how = KlReward { estimate: config.kl_penalty, subtract: true, clip: config.reward_clip };
            let penalised =
                rewards::with_kl(&token_rewards, (old, reference), &whole.response, how, &mut self.controller);
            token_rewards = penalised.rewards;
            metrics.extend(penalised.metrics);
        }
        let found = estimate(&token_rewards, None, &whole.response, &config.advantages());
        if let Some(fraction) = found.clip_fraction {
            metrics.insert("critic/advantage_clip_frac".into(), fraction);
        }
        spread(metrics, "critic/rewards", &rewards_of_rows(&token_rewards, &whole.response));
        spread(metrics, "critic/advantages", &kept(&found.advantages, &whole.response));
        spread(metrics, "critic/returns", &kept(&found.returns, &whole.response));
        let lengths: Vec<f64> = whole.response.row_counts().iter().map(|n| *n as f64).collect();
        spread(metrics, "tokens/response_length", &lengths);
        Ok(Prepared { samples, whole, advantages: found.advantages, old_log_probs, ref_log_probs, scores })
    }

    /// Rewards of tokens before any penalty.
    fn token_rewards(&self, episodes: &[Episode], samples: &[Sample], whole: &Batch, metrics: &mut Metrics) -> Grid {
        let config = &self.config;
        if config.adv_estimator == Estimator::AgenticReinforce {
            return turn_rewards(episodes, samples, whole);
        }
        let normalization = &config.reward_normalization;
        let group_key = |episode: &Episode| match normalization.grouping {
            Grouping::TrajGroupId => episode.group,
            Grouping::Batch | Grouping::Tags => 0,
        };
        let keys: Vec<usize> = samples.iter().map(|s| group_key(&episodes[s.episode])).collect();
        let resolved = normalization.resolved();
        let mut found = match config.adv_estimator.is_stepwise() {
            false => {
                let scores: Vec<f64> = samples.iter().map(|s| episodes[s.episode].score()).collect();
                rewards::normalize_grouped(&scores, &keys, resolved)
            }
            true => {
                let score = |s: &Sample| episodes[s.episode].steps[s.turn].reward;
                let scores: Vec<f64> = samples.iter().map(score).collect();
                let trajectories: Vec<usize> = samples.iter().map(|s| s.episode).collect();
                let turns: Vec<usize> = samples.iter().map(|s| s.turn).collect();
                let returns = rewards::step_returns(&scores, &trajectories, &turns, config.step_reward_gamma);
                match config.adv_estimator {
                    Estimator::Gigpo => {
                        let totals: Vec<f64> = samples.iter().map(|s| episodes[s.episode].score()).collect();
                        let state = |s: &Sample| {
                            let group = if config.states_across_groups { 0 } else { episodes[s.episode].group };
                            (group, episodes[s.episode].steps[s.turn].observation.as_str())
                        };
                        let states: Vec<_> = samples.iter().map(state).collect();
                        rewards::gigpo_rewards((&totals, &keys), (&returns, &states), normalization, config.gigpo())
                            .rewards
                    }
                    _ => rewards::normalize_grouped(&returns, &keys, resolved),
                }
            }
        };
        if let Some(bound) = config.reward_clip {
            metrics.insert("critic/reward_clip_frac".into(), rewards::clip(&mut found, bound));
        }
        rewards::at_last_token(&found, &whole.attention_mask)
    }

    /// Log-probabilities of all samples under the model as it is, or without its adapter. Each rank computes a share.
    fn log_probs(&self, ctx: &mut StepContext<'_>, samples: &[Sample], width: usize, adapter: Adapter) -> Result<Grid> {
        let mut values: Vec<f64> = Vec::new();
        let own: Vec<usize> = share(ctx, samples.len()).collect();
        for rows in by_episodes(samples, &own, self.config.micro_batch_size) {
            let evaluated = Evaluated::new(&rows.iter().map(|i| &samples[*i]).collect::<Vec<_>>(), width)?;
            let Batch { tokens, attention, .. } = &evaluated.batch;
            let (stats, _) = language(ctx.model)?.evaluate(tokens, attention, adapter, Grad::Skip)?;
            let log_probs = Grid::from_tensor("log-probabilities", &stats.log_probs)?;
            values.extend(evaluated.by_sample(&log_probs)?.values());
        }
        Grid::new(width - 1, join_values(ctx.strategy.communicator(), values)?)
    }

    /// Samples per update, over all ranks.
    fn mini_batch(&self, samples: usize) -> usize {
        match self.config.mini_batch_size {
            0 => samples.max(1),
            size => size,
        }
    }

    /// The updates of a step. Returns whether any changed the parameters.
    fn train(&self, ctx: &mut StepContext<'_>, prepared: &Prepared, metrics: &mut Metrics) -> Result<bool> {
        let mut joined = Joined::default();
        let mut applied = false;
        for epoch in 0..self.config.ppo_epochs {
            let order = match epoch {
                0 => (0..prepared.samples.len()).collect(),
                _ => ctx
                    .noise
                    .permutation(ctx.step * self.config.ppo_epochs as u64 + epoch as u64, prepared.samples.len()),
            };
            for rows in order.chunks(self.mini_batch(prepared.samples.len())) {
                let mut parts = Joined::default();
                applied |= self.one_update(ctx, prepared, rows, &mut parts)?;
                joined
                    .add(&parts.reduced().into_iter().map(|(name, value)| (name.replace("@sum", ""), value)).collect());
            }
        }
        metrics.extend(joined.reduced());
        if let Some(loss) = metrics.get("actor/total_loss").copied() {
            metrics.insert("actor/loss".into(), loss);
        }
        Ok(applied)
    }

    /// One update by the samples `rows`, of which each rank pulls back a share.
    fn one_update(
        &self,
        ctx: &mut StepContext<'_>,
        prepared: &Prepared,
        rows: &[usize],
        metrics: &mut Joined,
    ) -> Result<bool> {
        let all = Totals::of_responses(&rows_of_mask(&prepared.whole.response, rows)?);
        let totals = Totals { length: self.config.sequence_length as f64, ..all };
        let (mut own, mut nonfinite) = (Joined::default(), None);
        for rows in by_episodes(&prepared.samples, &rows[share(ctx, rows.len())], self.config.micro_batch_size) {
            let loss = self.pull(ctx, prepared, &rows, totals)?;
            own.add(&loss.1);
            if !loss.0.is_finite() {
                nonfinite = Some(("the loss".to_string(), loss.0));
                break;
            }
        }
        for part in communicator::join(ctx.strategy.communicator(), &own)? {
            metrics.append(part);
        }
        self.apply(ctx, nonfinite, metrics)
    }

    /// Adds the gradient of a micro-batch to the strategy; returns loss and metrics.
    fn pull(
        &self,
        ctx: &mut StepContext<'_>,
        prepared: &Prepared,
        rows: &[usize],
        totals: Totals,
    ) -> Result<(f64, Metrics)> {
        let chosen: Vec<&Sample> = rows.iter().map(|i| &prepared.samples[*i]).collect();
        // Rows are cut to the longest of the micro-batch: what is left out is padding.
        let width = chosen.iter().map(|s| s.tokens.len()).max().unwrap_or(0).max(2);
        let batch = Batch::new(&chosen, width)?;
        let cut = |grid: &Grid| -> Result<Grid> {
            Grid::new(width - 1, rows.iter().flat_map(|b| grid.row(*b)[..width - 1].to_vec()).collect())
        };
        let advantages = cut(&prepared.advantages)?;
        let old = prepared.old_log_probs.as_ref().map(cut).transpose()?;
        let reference = prepared.ref_log_probs.as_ref().map(cut).transpose()?;
        let scores: Vec<f64> = rows.iter().map(|b| prepared.scores[*b]).collect();

        let evaluated = Evaluated::new(&chosen, width)?;
        let Batch { tokens, attention, .. } = &evaluated.batch;
        let (stats, pullback) = language(ctx.model)?.evaluate(tokens, attention, Adapter::On, Grad::Record)?;
        let log_probs = evaluated.by_sample(&Grid::from_tensor("log-probabilities", &stats.log_probs)?)?;
        let entropy = evaluated.by_sample(&Grid::from_tensor("entropies", &stats.entropy)?)?;
        let inputs = LossInputs {
            log_probs: &log_probs,
            entropy: Some(&entropy),
            old_log_probs: old.as_ref(),
            infer_log_probs: Some(&batch.infer_log_probs),
            ref_log_probs: reference.as_ref(),
            advantages: &advantages,
            response_mask: &batch.response,
            episode_scores: &scores,
            correction: None,
        };
        let mut loss = policy_loss(&self.config.loss, &inputs, totals)?;
        let mean_entropy = super::Aggregation::TokenMean.of(&entropy, &batch.response, totals);
        loss.metrics.insert("actor/entropy@sum".into(), mean_entropy);
        let drift = log_probs.zip(&batch.infer_log_probs, |train, infer| (train - infer).abs()).masked(&batch.response);
        loss.metrics.insert(
            "actor/train_infer_abs_diff@sum".into(),
            super::Aggregation::TokenMean.of(&drift, &batch.response, totals),
        );
        if loss.value.is_finite() {
            let d_entropy = loss.d_entropy.unwrap_or_else(|| loss.d_log_probs.map(|_| 0.0));
            let (d_log_probs, d_entropy) = (evaluated.by_row(&loss.d_log_probs), evaluated.by_row(&d_entropy));
            let cotangent = [d_log_probs.values(), d_entropy.values()].concat();
            let cotangent: Vec<f32> = cotangent.into_iter().map(|d| d as f32).collect();
            let pullback = pullback.ok_or(AlgorithmError::NoPullback { what: "the language model".into() })?;
            let shape = [2, d_log_probs.rows(), d_log_probs.columns()];
            ctx.strategy.before_last_pull(ctx.model)?;
            pullback.pull(&Tensor::new(cotangent, shape)?).while_doing(|| "pulling back the policy loss".into())?;
            ctx.strategy.accumulate(ctx.model)?;
        }
        Ok((loss.value, loss.metrics))
    }

    /// Updates the parameters by what was accumulated, unless a rank met a value that is not finite.
    fn apply(&self, ctx: &mut StepContext<'_>, nonfinite: Option<(String, f64)>, metrics: &mut Joined) -> Result<bool> {
        // Every rank takes the same branch: each of them must enter the collectives of the update.
        let mut anywhere = [f32::from(u8::from(nonfinite.is_some()))];
        ctx.strategy.communicator().all_reduce(&mut anywhere)?;
        if anywhere[0] > 0.0 {
            update::forget(ctx)?;
            let (what, value) = nonfinite.unwrap_or(("the loss of another rank".into(), f64::NAN));
            return self.left_out(ctx.step, what, value);
        }
        // The losses are divided by totals over all ranks already.
        let update = ctx.strategy.step(ctx.model, ctx.learning_rate, 1.0)?;
        metrics.add(&BTreeMap::from([
            ("actor/grad_norm".to_string(), update.grad_norm),
            ("actor/grad_clipped".to_string(), f64::from(u8::from(update.clipped))),
        ]));
        match update.applied {
            true => Ok(true),
            false => self.left_out(ctx.step, "the gradient norm".into(), update.grad_norm),
        }
    }

    fn left_out(&self, step: u64, what: String, value: f64) -> Result<bool> {
        match self.config.on_nonfinite {
            OnNonfinite::Stop => Err(Error::NonFinite { what, value }),
            OnNonfinite::Skip => {
                tracing::warn!(step, value, "{what} is not finite: the update is left out");
                Ok(false)
            }
        }
    }
}

/// What this rank does of `count` things in a row.
fn share(ctx: &StepContext<'_>, count: usize) -> std::ops::Range<usize> {
    let (rank, world) = (ctx.strategy.communicator().rank().0, ctx.strategy.communicator().world_size());
    rank * count / world..(rank + 1) * count / world
}

/// The values of all ranks, one after another, bit by bit: JSON has no NaN.
fn join_values(ranks: &dyn Communicator, own: Vec<f64>) -> Result<Vec<f64>> {
    if ranks.world_size() == 1 {
        return Ok(own);
    }
    let own: Vec<u64> = own.into_iter().map(f64::to_bits).collect();
    Ok(communicator::join(ranks, &own)?.into_iter().flatten().map(f64::from_bits).collect())
}

/// The reward of each turn at the end of its answer.
fn turn_rewards(episodes: &[Episode], samples: &[Sample], whole: &Batch) -> Grid {
    let mut grid = Grid::filled(whole.response.rows(), whole.response.columns(), 0.0);
    for (b, sample) in samples.iter().enumerate() {
        for step in &episodes[sample.episode].steps {
            // Token t is predicted in column t - 1, and an answer ends at token `end - 1`.
            if let Some(slot) = step.tokens.end.checked_sub(2).and_then(|t| grid.row_mut(b).get_mut(t)) {
                *slot = step.reward;
            }
        }
    }
    grid
}

fn rows_of_mask(mask: &Mask, rows: &[usize]) -> Result<Mask> {
    Mask::new(mask.columns(), rows.iter().flat_map(|b| mask.row(*b).to_vec()).collect())
}

fn skipped(episode: &Episode) -> (String, String) {
    let reason = match &episode.ending {
        Ending::Failed(reason) => format!("the environment failed: {reason}"),
        _ => "the first prompt fills `sequence_length` or the model's context".into(),
    };
    (format!("episode of seed {}", episode.seed), reason)
}

fn kept(grid: &Grid, mask: &Mask) -> Vec<f64> {
    grid.values().iter().zip(mask.kept()).filter(|(_, kept)| **kept).map(|(v, _)| *v).collect()
}

fn rewards_of_rows(rewards: &Grid, mask: &Mask) -> Vec<f64> {
    super::statistics::row_sums(rewards, mask)
}

/// Mean, largest and least of `values`, when there are any.
fn spread(metrics: &mut Metrics, name: &str, values: &[f64]) {
    if values.is_empty() {
        return;
    }
    let fold = |f: fn(f64, f64) -> f64, start| values.iter().copied().fold(start, f);
    metrics.insert(format!("{name}/mean"), values.iter().sum::<f64>() / values.len() as f64);
    metrics.insert(format!("{name}/max"), fold(f64::max, f64::NEG_INFINITY));
    metrics.insert(format!("{name}/min"), fold(f64::min, f64::INFINITY));
}

/// What the episodes were like.
fn episode_metrics(episodes: &[Episode]) -> Metrics {
    let mut metrics = Metrics::new();
    let usable: Vec<&Episode> = episodes.iter().filter(|e| e.is_usable()).collect();
    let mean = |of: &dyn Fn(&Episode) -> f64| usable.iter().map(|e| of(e)).sum::<f64>() / usable.len().max(1) as f64;
    spread(&mut metrics, "score", &usable.iter().map(|e| e.score()).collect::<Vec<_>>());
    metrics.insert("env/episodes".into(), usable.len() as f64);
    metrics.insert("env/failed".into(), (episodes.len() - usable.len()) as f64);
    if !usable.is_empty() {
        let valid = |e: &Episode| e.steps.iter().filter(|s| s.valid).count() as f64 / e.steps.len() as f64;
        metrics.insert("env/success".into(), mean(&|e| f64::from(u8::from(e.solved))));
        metrics.insert("env/action_is_valid".into(), mean(&valid));
        metrics.insert("env/num_actions".into(), mean(&|e| e.steps.len() as f64));
        metrics.insert("env/token_limit".into(), mean(&|e| f64::from(u8::from(e.ending == Ending::TokenLimit))));
        metrics.insert("tokens/total_length".into(), mean(&|e| e.tokens.len() as f64));
    }
    metrics
}

roll_core::inventory::submit! {
    Registration {
        name: NAME,
        summary: "Trains a language model as an agent that acts in a text environment",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<Config>,
        factory: Factory::Algorithm(|options, _| Ok(Box::new(AgenticPpo::new(parse_options("algo", options)?)?))),
        planner: None,
    }
}
