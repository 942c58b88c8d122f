//! Turns the episodes of a step into samples with the inputs of the loss: log-probabilities, rewards of tokens,
//! advantages.

use std::collections::BTreeMap;

use roll_core::{Adapter, Grad, Result, StepContext};
use roll_step::ranks::{join_f64, share};
use roll_step::update::language;

use super::NAME;
use super::advantages::{Advantages, estimate};
use super::batch::{Batch, ConversationBatch, TextSample, by_episodes, padded_width, text_samples};
use super::config::{AgenticPpoConfig, Estimator};
use super::critic::{Critic, ValueEstimates, explained_variance};
use super::episode::{Episode, Step};
use super::grid::{Grid, Mask};
use super::kl::KlController;
use super::report::insert_spread;
use super::rewards::{self, Grouping};
use super::statistics::row_sums;

/// The samples of a step, of all ranks, with everything that the loss needs. Grids are `[B, L - 1]`.
pub(super) struct Prepared {
    pub(super) samples: Vec<TextSample>,
    /// All samples as one batch.
    pub(super) whole: Batch,
    pub(super) advantages: Grid,
    /// The returns, neither whitened nor clipped.
    pub(super) returns: Grid,
    /// The critic's values; `None` without a critic.
    pub(super) estimates: Option<ValueEstimates>,
    /// Log-probabilities that the ratio of the loss is relative to; `None` if it is relative to the present policy.
    pub(super) old_log_probs: Option<Grid>,
    /// Log-probabilities of the reference policy; `None` if the loss and the rewards do not need them.
    pub(super) ref_log_probs: Option<Grid>,
    /// Score of the episode of each sample.
    pub(super) scores: Vec<f64>,
}

/// Computes rewards, log-probabilities and advantages of all samples, and adds metrics of them.
pub(super) fn prepare(
    config: &AgenticPpoConfig,
    controller: &mut KlController,
    critic: &mut Critic,
    ctx: &mut StepContext<'_>,
    episodes: &[Episode],
    metrics: &mut BTreeMap<String, f64>,
) -> Result<Prepared> {
    let samples = text_samples(episodes, config.adv_estimator.is_stepwise(), config.truncated_answers);
    let all: Vec<&TextSample> = samples.iter().collect();
    let width = padded_width(&all);
    let whole = Batch::new(&all, width)?;
    let scores: Vec<f64> = samples.iter().map(|s| episodes[s.episode].score()).collect();

    let updates = config.ppo_epochs * samples.len().max(1).div_ceil(config.mini_batch(samples.len()));
    let recompute = updates > 1 || config.enable_old_logprobs_recompute || config.add_token_level_kl;
    let corrects = config.loss.train_infer_correction.is_active();
    let old_log_probs = if config.is_asynchronous() && !corrects {
        // The policy before the last update played the episodes, so the ratio of the loss is relative to that policy.
        // An active correction would already weigh tokens by the ratio of the present policy to that policy.
        Some(whole.raw_log_probs.clone())
    } else if recompute {
        Some(log_probs(config, ctx, &samples, width, Adapter::On)?)
    } else {
        None
    };
    let mut ref_log_probs = None;
    if config.needs_reference() {
        ref_log_probs = Some(log_probs(config, ctx, &samples, width, Adapter::Off)?);
    }

    let mut token_rewards = rewards_of_tokens(config, episodes, &samples, &whole, metrics);
    if config.add_token_level_kl
        && let (Some(old), Some(reference)) = (&old_log_probs, &ref_log_probs)
    {
        let (kl_estimate, clip, mask) = (config.kl_penalty, config.reward_clip, &whole.response);
        let penalised = rewards::with_kl(&token_rewards, (old, reference), mask, kl_estimate, clip, controller);
        token_rewards = penalised.rewards;
        metrics.extend(penalised.metrics);
    }
    let estimates = match config.adv_estimator {
        Estimator::Gae => Some(critic.values(config, ctx, &samples, &whole.response)?),
        _ => None,
    };
    let values = estimates.as_ref().map(|estimates| &estimates.values);
    // Rewards are discounted over response tokens only.
    let estimated = estimate(&token_rewards, values, &whole.response, &whole.response, config);
    if let Some(values) = values {
        insert_spread(metrics, "critic/values", &values_in(values, &whole.response));
        if let Some(explained) = explained_variance(values, &estimated.returns, &whole.response) {
            metrics.insert("critic/explained_variance".into(), explained);
        }
    }
    if let Some(fraction) = estimated.clip_fraction {
        metrics.insert("critic/advantage_clip_frac".into(), fraction);
    }
    insert_spread(metrics, "critic/rewards", &row_sums(&token_rewards, &whole.response));
    insert_spread(metrics, "critic/advantages", &values_in(&estimated.advantages, &whole.response));
    insert_spread(metrics, "critic/returns", &values_in(&estimated.returns, &whole.response));
    let lengths: Vec<f64> = whole.response.row_counts().iter().map(|n| *n as f64).collect();
    insert_spread(metrics, "tokens/response_length", &lengths);
    let Advantages { advantages, returns, .. } = estimated;
    Ok(Prepared { samples, whole, advantages, returns, estimates, old_log_probs, ref_log_probs, scores })
}

/// The mean difference between the log-probabilities of the agent's tokens that generation reported, at temperature 1,
/// and those of the present policy.
pub(super) fn engine_difference(
    config: &AgenticPpoConfig,
    ctx: &mut StepContext<'_>,
    prepared: &Prepared,
) -> Result<f64> {
    let Prepared { samples, whole, .. } = prepared;
    let present = log_probs(config, ctx, samples, whole.response.columns() + 1, Adapter::On)?;
    let differences = present.zip(&whole.raw_log_probs, |present, reported| (present - reported).abs());
    let values = values_in(&differences, &whole.response);
    Ok(values.iter().sum::<f64>() / values.len().max(1) as f64)
}

/// The rewards of tokens before a KL is subtracted: the normalised reward of each sample, at its last token.
fn rewards_of_tokens(
    config: &AgenticPpoConfig,
    episodes: &[Episode],
    samples: &[TextSample],
    whole: &Batch,
    metrics: &mut BTreeMap<String, f64>,
) -> Grid {
    let normalization = &config.reward_normalization;
    let key_of = |episode| {
        let Episode { group, tag, .. }: &Episode = episode;
        match normalization.grouping {
            Grouping::TrajGroupId => (*group, ""),
            Grouping::Tags => (0, tag.as_str()),
            Grouping::Batch => (0, ""),
        }
    };
    let keys: Vec<(usize, &str)> = samples.iter().map(|sample| key_of(&episodes[sample.episode])).collect();
    let resolved = normalization.resolved();
    let episode_scores: Vec<f64> = samples.iter().map(|s| episodes[s.episode].score()).collect();
    let mut sample_rewards = if config.adv_estimator.is_stepwise() {
        let turn_reward = |s: &TextSample| episodes[s.episode].steps[s.turn].reward;
        let turn_rewards: Vec<f64> = samples.iter().map(turn_reward).collect();
        let trajectories: Vec<usize> = samples.iter().map(|s| s.episode).collect();
        let turns: Vec<usize> = samples.iter().map(|s| s.turn).collect();
        let returns = rewards::step_returns(&turn_rewards, &trajectories, &turns, config.step_reward_gamma);
        match config.adv_estimator {
            Estimator::Gigpo => {
                // Turns of a group with the same observation, pictures included, are in the same state.
                let state = |s: &TextSample| {
                    let episode = &episodes[s.episode];
                    let Step { observation, pictures, .. } = &episode.steps[s.turn];
                    let pixels = |position: &usize| {
                        let picture = &episode.pictures[*position];
                        (picture.size(), picture.pixels().as_bytes())
                    };
                    (episode.group, observation.as_str(), pictures.iter().map(pixels).collect::<Vec<_>>())
                };
                let states: Vec<_> = samples.iter().map(state).collect();
                let weights = [config.episode_reward_weight, config.step_reward_weight];
                rewards::gigpo_rewards((&episode_scores, &keys), (&returns, &states), normalization, weights)
            }
            _ => rewards::normalize_grouped(&returns, &keys, resolved),
        }
    } else {
        // Each episode counts once, however many texts it has.
        let scores: Vec<f64> = episodes.iter().map(Episode::score).collect();
        let keys: Vec<(usize, &str)> = episodes.iter().map(key_of).collect();
        let normalized = rewards::normalize_grouped(&scores, &keys, resolved);
        samples.iter().map(|sample| normalized[sample.episode]).collect()
    };
    if let Some(bound) = config.reward_clip {
        metrics.insert("critic/reward_clip_frac".into(), rewards::clip(&mut sample_rewards, bound));
    }
    rewards::at_last_token(&sample_rewards, &whole.attention_mask)
}

/// Log-probabilities of the response tokens of all samples, `[B, width - 1]`, under the model with or without its
/// adapter. Each rank computes a share.
fn log_probs(
    config: &AgenticPpoConfig,
    ctx: &mut StepContext<'_>,
    samples: &[TextSample],
    width: usize,
    adapter: Adapter,
) -> Result<Grid> {
    let mut values: Vec<f64> = Vec::new();
    let own_share: Vec<usize> = share(ctx.strategy.ranks().all.as_ref(), samples.len()).collect();
    for rows in by_episodes(samples, &own_share, config.micro_batch_size) {
        let evaluated = ConversationBatch::new(&rows.iter().map(|i| &samples[*i]).collect::<Vec<_>>(), width)?;
        let Batch { tokens, attention, .. } = &evaluated.batch;
        let model = language(ctx.model, NAME)?;
        let (stats, _) = model.evaluate(tokens, attention, &evaluated.wanted, adapter, Grad::Skip)?;
        let log_probs = Grid::from_tensor("log-probabilities", &stats.log_probs)?;
        values.extend(evaluated.by_sample(&log_probs)?.values());
    }
    Grid::new(width - 1, join_f64(ctx.strategy.ranks().all.as_ref(), values)?)
}

/// The values of the tokens of `mask`.
fn values_in(grid: &Grid, mask: &Mask) -> Vec<f64> {
    grid.values().iter().zip(mask.kept()).filter(|(_, kept)| **kept).map(|(v, _)| *v).collect()
}
