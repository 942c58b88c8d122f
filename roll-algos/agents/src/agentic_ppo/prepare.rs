//! From episodes to the samples of a step: log-probabilities, rewards of tokens, advantages.

use std::collections::BTreeMap;

use roll_core::{Adapter, Grad, Result, StepContext};
use roll_step::ranks::{join_f64, share};
use roll_step::update::language;

use super::NAME;
use super::advantages::{Advantages, estimate};
use super::batch::{Batch, ConversationBatch, TextSample, by_episodes, samples, width};
use super::config::AgenticPpoConfig;
use super::config::Estimator;
use super::critic::{Critic, ValueEstimates, explained_variance};
use super::episode::Episode;
use super::grid::{Grid, Mask};
use super::kl::KlController;
use super::report::spread;
use super::rewards::{self, Grouping};
use super::statistics::row_sums;

/// The samples of a step with everything that the loss needs; grids are `[B, L - 1]`.
pub(super) struct Prepared {
    pub(super) samples: Vec<TextSample>,
    pub(super) whole: Batch,
    pub(super) advantages: Grid,
    /// Before they are whitened or clipped.
    pub(super) returns: Grid,
    /// The critic's values, where there is one.
    pub(super) estimates: Option<ValueEstimates>,
    pub(super) old_log_probs: Option<Grid>,
    pub(super) ref_log_probs: Option<Grid>,
    pub(super) scores: Vec<f64>,
}

/// Rewards, log-probabilities and advantages of all samples.
pub(super) fn prepare(
    config: &AgenticPpoConfig,
    controller: &mut KlController,
    critic: &mut Critic,
    ctx: &mut StepContext<'_>,
    episodes: &[Episode],
    metrics: &mut BTreeMap<String, f64>,
) -> Result<Prepared> {
    let samples = samples(episodes, config.adv_estimator.is_stepwise());
    let all: Vec<&TextSample> = samples.iter().collect();
    let width = width(&all);
    let whole = Batch::new(&all, width)?;
    let scores: Vec<f64> = samples.iter().map(|s| episodes[s.episode].score()).collect();

    let updates = config.ppo_epochs * samples.len().max(1).div_ceil(config.mini_batch(samples.len()));
    let recompute = updates > 1 || config.enable_old_logprobs_recompute || config.add_token_level_kl;
    let corrects = config.loss.train_infer_correction.is_active();
    let old_log_probs = match (config.is_asynchronous() && !corrects, recompute) {
        // Log-probabilities of the policy before the last update, which wrote the episodes. The correction weighs with
        // the ratio of the current policy to that one, so with it the ratio of the loss is to the current policy.
        (true, _) => Some(whole.raw_log_probs.clone()),
        (false, true) => Some(log_probs(config, ctx, &samples, width, Adapter::On)?),
        (false, false) => None,
    };
    let ref_log_probs = match config.needs_reference() {
        true => Some(log_probs(config, ctx, &samples, width, Adapter::Off)?),
        false => None,
    };

    let mut token_rewards = token_rewards(config, episodes, &samples, &whole, metrics);
    let reference = ref_log_probs.as_ref().filter(|_| config.add_token_level_kl);
    if let (Some(old), Some(reference)) = (&old_log_probs, reference) {
        let (estimate, clip, mask) = (config.kl_penalty, config.reward_clip, &whole.response);
        let penalised = rewards::with_kl(&token_rewards, (old, reference), mask, estimate, clip, controller);
        token_rewards = penalised.rewards;
        metrics.extend(penalised.metrics);
    }
    let estimates = match config.adv_estimator {
        Estimator::Gae => Some(critic.values(config, ctx, &samples, &whole.response)?),
        _ => None,
    };
    let values = estimates.as_ref().map(|estimates| &estimates.values);
    let found = estimate(&token_rewards, values, &whole.response, &whole.response, config);
    if let Some(values) = values {
        spread(metrics, "critic/values", &kept(values, &whole.response));
        if let Some(explained) = explained_variance(values, &found.returns, &whole.response) {
            metrics.insert("critic/explained_variance".into(), explained);
        }
    }
    if let Some(fraction) = found.clip_fraction {
        metrics.insert("critic/advantage_clip_frac".into(), fraction);
    }
    spread(metrics, "critic/rewards", &row_sums(&token_rewards, &whole.response));
    spread(metrics, "critic/advantages", &kept(&found.advantages, &whole.response));
    spread(metrics, "critic/returns", &kept(&found.returns, &whole.response));
    let lengths: Vec<f64> = whole.response.row_counts().iter().map(|n| *n as f64).collect();
    spread(metrics, "tokens/response_length", &lengths);
    let Advantages { advantages, returns, .. } = found;
    Ok(Prepared { samples, whole, advantages, returns, estimates, old_log_probs, ref_log_probs, scores })
}

/// Rewards of tokens before any penalty.
fn token_rewards(
    config: &AgenticPpoConfig,
    episodes: &[Episode],
    samples: &[TextSample],
    whole: &Batch,
    metrics: &mut BTreeMap<String, f64>,
) -> Grid {
    let normalization = &config.reward_normalization;
    let group_key = |sample: &TextSample| {
        let episode = &episodes[sample.episode];
        match normalization.grouping {
            Grouping::TrajGroupId => (episode.group, ""),
            Grouping::Tags => (0, episode.tag.as_str()),
            Grouping::Batch => (0, ""),
        }
    };
    let keys: Vec<(usize, &str)> = samples.iter().map(group_key).collect();
    let resolved = normalization.resolved();
    let mut found = match config.adv_estimator.is_stepwise() {
        false => {
            let scores: Vec<f64> = samples.iter().map(|s| episodes[s.episode].score()).collect();
            rewards::normalize_grouped(&scores, &keys, resolved)
        }
        true => {
            let score = |s: &TextSample| episodes[s.episode].steps[s.turn].reward;
            let scores: Vec<f64> = samples.iter().map(score).collect();
            let trajectories: Vec<usize> = samples.iter().map(|s| s.episode).collect();
            let turns: Vec<usize> = samples.iter().map(|s| s.turn).collect();
            let returns = rewards::step_returns(&scores, &trajectories, &turns, config.step_reward_gamma);
            match config.adv_estimator {
                Estimator::Gigpo => {
                    let totals: Vec<f64> = samples.iter().map(|s| episodes[s.episode].score()).collect();
                    let state = |s: &TextSample| {
                        let episode = &episodes[s.episode];
                        (episode.group, episode.steps[s.turn].observation.as_str())
                    };
                    let states: Vec<_> = samples.iter().map(state).collect();
                    let weights = [config.episode_reward_weight, config.step_reward_weight];
                    rewards::gigpo_rewards((&totals, &keys), (&returns, &states), normalization, weights)
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
fn log_probs(
    config: &AgenticPpoConfig,
    ctx: &mut StepContext<'_>,
    samples: &[TextSample],
    width: usize,
    adapter: Adapter,
) -> Result<Grid> {
    let mut values: Vec<f64> = Vec::new();
    let own: Vec<usize> = share(ctx.strategy.ranks().all.as_ref(), samples.len()).collect();
    for rows in by_episodes(samples, &own, config.micro_batch_size) {
        let evaluated = ConversationBatch::new(&rows.iter().map(|i| &samples[*i]).collect::<Vec<_>>(), width)?;
        let Batch { tokens, attention, .. } = &evaluated.batch;
        let (stats, _) = language(ctx.model, NAME)?.evaluate(tokens, attention, adapter, Grad::Skip)?;
        let log_probs = Grid::from_tensor("log-probabilities", &stats.log_probs)?;
        values.extend(evaluated.by_sample(&log_probs)?.values());
    }
    Grid::new(width - 1, join_f64(ctx.strategy.ranks().all.as_ref(), values)?)
}

fn kept(grid: &Grid, mask: &Mask) -> Vec<f64> {
    grid.values().iter().zip(mask.kept()).filter(|(_, kept)| **kept).map(|(v, _)| *v).collect()
}
