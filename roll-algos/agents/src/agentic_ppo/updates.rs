//! The updates of a step: mini-batches of its samples, each pulled back through the policy loss in micro-batches.

use std::collections::BTreeMap;

use roll_core::{Adapter, Grad, Noise, Result, ResultExt, StepContext, Tensor, communicator};
use roll_step::AlgorithmError;
use roll_step::ranks::share;
use roll_step::update::{self, language};

use super::NAME;
use super::aggregate::{Aggregation, Totals};
use super::batch::{Batch, ConversationBatch, TextSample, by_episodes, padded_width};
use super::config::{AgenticPpoConfig, InferLogProbs};
use super::grid::{Grid, Mask};
use super::loss::{LossInputs, policy_loss};
use super::metrics::{ActorMetrics, MicroBatchMetrics};
use super::prepare::Prepared;

/// The loss of one micro-batch.
struct MicroBatchLoss {
    value: f64,
    metrics: ActorMetrics,
}

/// Makes the updates of a step and adds their metrics. Returns whether any update changed the parameters.
pub(super) fn train(
    config: &AgenticPpoConfig,
    ctx: &mut StepContext<'_>,
    prepared: &Prepared,
    metrics: &mut BTreeMap<String, f64>,
) -> Result<bool> {
    let mut metrics_of_updates = MicroBatchMetrics::default();
    let mut applied = false;
    let is_trained = |row: &usize| prepared.samples[*row].response.iter().any(|trained| *trained);
    let trained: Vec<usize> = (0..prepared.samples.len()).filter(is_trained).collect();
    for epoch in 0..config.ppo_epochs {
        let order = drawn_order(config, ctx.noise, ctx.step, epoch, &prepared.samples, &trained);
        for rows in order.chunks(config.mini_batch(trained.len())) {
            let mut metrics_of_micro_batches = MicroBatchMetrics::default();
            applied |= one_update(config, ctx, prepared, rows, &mut metrics_of_micro_batches)?;
            metrics_of_updates.add(&metrics_of_micro_batches.whole());
        }
    }
    metrics.extend(metrics_of_updates.reduced().logged());
    if let Some(loss) = metrics.get("actor/total_loss").copied() {
        metrics.insert("actor/loss".into(), loss);
    }
    Ok(applied)
}

/// The order in which an epoch takes `rows`, the samples of a step that are trained on. It is drawn for each epoch, as in the reference, so that a
/// mini-batch is not one group of episodes. The first epoch does not change the order if one update takes all samples.
///
/// Unlike in the reference, turns of one conversation stay together: they are evaluated in one pass, which would be
/// repeated in every mini-batch that has one of the turns.
fn drawn_order(
    config: &AgenticPpoConfig,
    noise: &Noise,
    step: u64,
    epoch: usize,
    samples: &[TextSample],
    rows: &[usize],
) -> Vec<usize> {
    if epoch == 0 && rows.len() <= config.mini_batch(rows.len()) {
        return rows.to_vec();
    }
    let conversations = by_episodes(samples, rows, 1);
    let drawn = noise.permutation(step * config.ppo_epochs as u64 + epoch as u64, conversations.len());
    drawn.into_iter().flat_map(|i| conversations[i].iter().copied()).collect()
}

/// Makes one update with the samples `rows`, of which each rank pulls back a share. Adds the metrics of the
/// micro-batches of all ranks. Returns whether the parameters changed.
fn one_update(
    config: &AgenticPpoConfig,
    ctx: &mut StepContext<'_>,
    prepared: &Prepared,
    rows: &[usize],
    metrics: &mut MicroBatchMetrics,
) -> Result<bool> {
    let counts = Totals::of_responses(&rows_of_mask(&prepared.whole.response, rows)?);
    let totals = Totals { length: config.sequence_length as f64, ..counts };
    let (mut metrics_of_this_rank, mut nonfinite) = (MicroBatchMetrics::default(), None);
    let own_rows = &rows[share(ctx.strategy.ranks().all.as_ref(), rows.len())];
    for micro_batch in by_episodes(&prepared.samples, own_rows, config.micro_batch_size) {
        let loss = pull(config, ctx, prepared, &micro_batch, totals)?;
        metrics_of_this_rank.add(&loss.metrics);
        if !loss.value.is_finite() {
            nonfinite = Some(("the loss".to_string(), loss.value));
            break;
        }
    }
    for metrics_of_a_rank in communicator::join(ctx.strategy.ranks().all.as_ref(), &metrics_of_this_rank)? {
        metrics.append(metrics_of_a_rank);
    }
    // `pull` has divided the losses by totals over all ranks, and `finish` divides by the sum of `counted` over ranks.
    // So that sum must be 1: rank 0 counts one sample for the whole update.
    let counted = f64::from(u8::from(ctx.strategy.ranks().all.rank().0 == 0));
    let update = update::finish(ctx, counted, &mut nonfinite, config.on_nonfinite, update::nothing_before_update)?;
    if let Some(update) = &update {
        let mut metrics_of_update = ActorMetrics::default();
        metrics_of_update.mean("grad_norm", update.grad_norm);
        metrics_of_update.mean("grad_clipped", f64::from(u8::from(update.clipped)));
        metrics.add(&metrics_of_update);
    }
    Ok(update.is_some_and(|update| update.applied))
}

/// Computes the loss of the micro-batch `rows`, and adds its gradient to the strategy unless the loss is not finite.
fn pull(
    config: &AgenticPpoConfig,
    ctx: &mut StepContext<'_>,
    prepared: &Prepared,
    rows: &[usize],
    totals: Totals,
) -> Result<MicroBatchLoss> {
    let chosen: Vec<&TextSample> = rows.iter().map(|i| &prepared.samples[*i]).collect();
    // Grids of the step are as wide as its longest sample. Here rows are cut to the longest sample of the micro-batch,
    // which leaves out nothing but padding.
    let width = padded_width(&chosen);
    let batch = Batch::new(&chosen, width)?;
    let cut = |grid: &Grid| -> Result<Grid> {
        Grid::new(width - 1, rows.iter().flat_map(|b| grid.row(*b)[..width - 1].to_vec()).collect())
    };
    let advantages = cut(&prepared.advantages)?;
    let old = prepared.old_log_probs.as_ref().map(cut).transpose()?;
    let reference = prepared.ref_log_probs.as_ref().map(cut).transpose()?;
    let scores: Vec<f64> = rows.iter().map(|b| prepared.scores[*b]).collect();

    let evaluated = ConversationBatch::new(&chosen, width)?;
    let Batch { tokens, attention, .. } = &evaluated.batch;
    let model = language(ctx.model, NAME)?;
    let (stats, pullback) = model.evaluate(tokens, attention, &evaluated.wanted, Adapter::On, Grad::Record)?;
    let log_probs = evaluated.by_sample(&Grid::from_tensor("log-probabilities", &stats.log_probs)?)?;
    let entropy = evaluated.by_sample(&Grid::from_tensor("entropies", &stats.entropy)?)?;
    let inputs = LossInputs {
        log_probs: &log_probs,
        entropy: Some(&entropy),
        old_log_probs: old.as_ref(),
        infer_log_probs: Some(match config.infer_log_probs {
            InferLogProbs::Drawn => &batch.infer_log_probs,
            InferLogProbs::Raw => &batch.raw_log_probs,
        }),
        ref_log_probs: reference.as_ref(),
        advantages: &advantages,
        response_mask: &batch.response,
        episode_scores: &scores,
    };
    let mut loss = policy_loss(&config.loss, &inputs, totals)?;
    let mean = |grid: &Grid| Aggregation::TokenMean.of(grid, &batch.response, totals);
    loss.metrics.sum("entropy", mean(&entropy));
    // The first metric compares log-probabilities of the same distribution, so that only kernels make a difference. The
    // second also has the difference between the distribution that is trained and the one that tokens were drawn from.
    for (name, reported) in
        [("train_infer_abs_diff", &batch.raw_log_probs), ("train_drawn_abs_diff", &batch.infer_log_probs)]
    {
        let drift = log_probs.zip(reported, |train, infer| (train - infer).abs()).masked(&batch.response);
        loss.metrics.sum(name, mean(&drift));
    }
    if loss.value.is_finite() {
        let d_entropy = loss.d_entropy.unwrap_or_else(|| loss.d_log_probs.map(|_| 0.0));
        let (d_log_probs, d_entropy) = (evaluated.by_row(&loss.d_log_probs), evaluated.by_row(&d_entropy));
        // [2, rows, columns]: of the log-probabilities, then of the entropies.
        let cotangent = [d_log_probs.values(), d_entropy.values()].concat();
        let cotangent: Vec<f32> = cotangent.into_iter().map(|d| d as f32).collect();
        let pullback = pullback.ok_or(AlgorithmError::NoPullback { what: "the language model".into() })?;
        let shape = [2, d_log_probs.rows(), d_log_probs.columns()];
        ctx.strategy.before_last_pull(ctx.model)?;
        pullback.pull(&Tensor::new(cotangent, shape)?).while_doing(|| "pulling back the policy loss".into())?;
        ctx.strategy.accumulate(ctx.model)?;
    }
    Ok(MicroBatchLoss { value: loss.value, metrics: loss.metrics })
}

/// The mask of these rows alone.
fn rows_of_mask(mask: &Mask, rows: &[usize]) -> Result<Mask> {
    Mask::new(mask.columns(), rows.iter().flat_map(|b| mask.row(*b).to_vec()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(episode: usize, turn: usize) -> TextSample {
        let (tokens, response, log_probs) = (vec![1, 2], vec![false, true], vec![0.0; 2]);
        TextSample { episode, turn, begins: 0, tokens, response, raw_log_probs: log_probs.clone(), log_probs }
    }

    #[test]
    fn mini_batches_are_of_whole_conversations() {
        let samples: Vec<TextSample> =
            (0..6).flat_map(|episode| (0..=episode % 3).map(move |turn| sample(episode, turn))).collect();
        let config = AgenticPpoConfig { mini_batch_size: 4, ..Default::default() };
        let rows: Vec<usize> = (0..samples.len()).collect();
        let order = drawn_order(&config, &Noise::new(1), 3, 0, &samples, &rows);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, rows);
        let mut episodes: Vec<usize> = order.iter().map(|row| samples[*row].episode).collect();
        episodes.dedup();
        assert_eq!(episodes.len(), 6, "the turns of each stand together: {order:?}");
        assert!(episodes.windows(2).any(|pair| pair[0] > pair[1]), "drawn: {episodes:?}");
    }

    #[test]
    fn every_epoch_with_several_updates_draws_its_mini_batches() {
        let config = |mini_batch_size| AgenticPpoConfig { mini_batch_size, ppo_epochs: 2, ..Default::default() };
        let samples: Vec<TextSample> = (0..16).map(|episode| sample(episode, 0)).collect();
        let rows: Vec<usize> = (0..16).collect();
        let order = |mini_batch_size, step, epoch| {
            drawn_order(&config(mini_batch_size), &Noise::new(1), step, epoch, &samples, &rows)
        };
        let mut orders = vec![order(8, 3, 0), order(8, 3, 1), order(8, 4, 0), order(8, 4, 1)];
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, rows);
        }
        orders.push(rows.clone());
        assert!((0..5).all(|a| (0..a).all(|b| orders[a] != orders[b])), "{orders:?}");
        assert_eq!([order(0, 3, 0), order(16, 3, 0), order(20, 3, 0)], [rows.clone(), rows.clone(), rows]);
    }
}
