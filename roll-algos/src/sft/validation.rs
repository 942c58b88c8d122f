//! The loss on conversations that are not trained on.

use roll_core::{Communicator, Error, Grad, Model, Progress, Result, Validation};

use super::conversations::{Conversations, Tokens};
use super::{NAME, SftConfig, evaluate};
use crate::ranks::{join_f64, share};
use crate::update::language;

/// `val/loss`, the mean over the tokens that would be trained on, and their number as `val/tokens`. Of several ranks
/// each takes a part, and all know the result. Conversations that are too long are left out, as in training.
pub(super) fn loss(
    config: &SftConfig,
    held_out: &Conversations,
    ranks: &dyn Communicator,
    model: &mut dyn Model,
    progress: &dyn Progress,
) -> Result<Validation> {
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
        negative_log_likelihood += evaluate(model, chunk, Grad::Skip)?.sums.negative_log_likelihood;
    }
    let sums = join_f64(ranks, vec![negative_log_likelihood, tokens as f64])?;
    let sum = |which: usize| sums.iter().skip(which).step_by(2).sum::<f64>();
    let tokens = sum(1);
    if tokens == 0.0 {
        let problem = "no conversation of it has a token that is trained on, within `algo.sequence_length`";
        return Err(Error::config("algo.val_data", problem));
    }
    let metrics = [("val/loss".to_string(), sum(0) / tokens), ("val/tokens".to_string(), tokens)];
    Ok(Validation { metrics: metrics.into(), records: Vec::new() })
}
