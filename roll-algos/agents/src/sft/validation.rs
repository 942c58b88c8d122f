//! The loss on conversations that are not trained on.

use std::collections::BTreeMap;

use roll_core::{Adapter, Communicator, Error, Grad, Model, Progress, Result};
use roll_step::ranks::{join_f64, share};
use roll_step::update::language;

use super::{NAME, SftConfig, Sums};
use crate::conversations::{Conversations, Tokens, batch};

/// The metrics `val/loss`, the mean loss of the tokens that would be trained on, and `val/tokens`, their number. Each
/// rank evaluates a share of the conversations; every rank returns the metrics of all. Conversations that are too long
/// are left out, as in training.
pub(super) fn loss(
    config: &SftConfig,
    held_out: &Conversations,
    ranks: &dyn Communicator,
    model: &mut dyn Model,
    progress: &dyn Progress,
) -> Result<BTreeMap<String, f64>> {
    let mut batch = Vec::new();
    let text_model = language(model, NAME)?;
    let limit = config.limit(text_model);
    for row in share(ranks, held_out.len()) {
        let samples = held_out.samples(row, config.train_on, text_model)?;
        batch.extend(samples.into_iter().filter(|sample| sample.is_usable(limit)));
    }
    // Similar lengths share a micro-batch, so that little is padded.
    batch.sort_by_key(|tokens| tokens.ids.len());
    let (mut negative_log_likelihood, tokens) = (0.0, batch.iter().map(Tokens::trained).sum::<usize>());
    for (i, chunk) in batch.chunks(config.micro_batch_size).enumerate() {
        if progress.interrupted() {
            return Err(Error::Interrupted);
        }
        progress.phase(&format!("validating, batch {} of {}", i + 1, batch.len().div_ceil(config.micro_batch_size)));
        negative_log_likelihood += {
            let evaluated = batch::evaluate(language(model, NAME)?, chunk, Adapter::On, Grad::Skip)?;
            Sums::of(&evaluated)?.negative_log_likelihood
        };
    }
    // The two numbers of each rank, one rank after another.
    let of_all_ranks = join_f64(ranks, vec![negative_log_likelihood, tokens as f64])?;
    let negative_log_likelihood: f64 = of_all_ranks.iter().step_by(2).sum();
    let tokens: f64 = of_all_ranks.iter().skip(1).step_by(2).sum();
    if tokens == 0.0 {
        let problem = "no conversation of it has a token that is trained on, within `algo.sequence_length`";
        return Err(Error::config("algo.val_data", problem));
    }
    let metrics = [("val/loss".to_string(), negative_log_likelihood / tokens), ("val/tokens".to_string(), tokens)];
    Ok(metrics.into())
}
