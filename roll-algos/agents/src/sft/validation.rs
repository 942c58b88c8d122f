//! The loss on conversations that are not trained on, and answers to some of them.

use std::collections::BTreeMap;

use roll_core::{Communicator, Error, Grad, Model, Progress, Result, Sampling};
use roll_step::ranks::{join_f64, share};
use roll_step::update::language;
use serde_json::{Value, json};

use super::conversations::{Conversations, Tokens};
use super::{NAME, SftConfig, TrainOn, evaluate};

/// Number of conversations that are answered.
const ANSWERED: usize = 3;
/// Most tokens of an answer.
const ANSWER_TOKENS: usize = 256;
/// Most characters of a prompt in a record: its last ones.
const PROMPT_CHARACTERS: usize = 1500;

/// The last answer of each of the first conversations, as the data have it and as the model writes it, with the
/// likeliest tokens: lines for `trajectories.jsonl`. None if all tokens are trained on: there are no prompts.
pub(super) fn answers(
    config: &SftConfig,
    held_out: &Conversations,
    step: u64,
    model: &mut dyn Model,
    progress: &dyn Progress,
) -> Result<Vec<Value>> {
    let (model, mut asked) = (language(model, NAME)?, Vec::new());
    let rows = if config.train_on == TrainOn::All { 0 } else { held_out.len().min(ANSWERED) };
    for row in 0..rows {
        let samples = held_out.samples(row, config.train_on, model)?;
        let last = samples.into_iter().rfind(|sample| sample.is_usable(config.limit(model)));
        asked.extend(last.and_then(Tokens::last_answer).map(|[prompt, wanted]| (row, prompt, wanted)));
    }
    if asked.is_empty() {
        return Ok(Vec::new());
    }
    progress.phase("answering held-out conversations");
    let prompts: Vec<Vec<u32>> = asked.iter().map(|(_, prompt, _)| prompt.clone()).collect();
    let limits = prompts.iter().map(|prompt| model.context_length().saturating_sub(prompt.len())).collect();
    let written = model.generate(&prompts, &Sampling { limits, ..Sampling::greedy(ANSWER_TOKENS) })?;
    let record = |((row, prompt, wanted), answer): (&(usize, Vec<u32>, Vec<u32>), &roll_core::Generation)| {
        let prompt = model.detokenize(prompt)?;
        let from = prompt.char_indices().rev().nth(PROMPT_CHARACTERS - 1).map_or(0, |(at, _)| at);
        let (wanted, answer) = (model.detokenize(wanted)?, model.detokenize(&answer.tokens)?);
        let (origin, prompt) = (held_out.origin(*row), &prompt[from..]);
        Ok(json!({
            "step": step, "kind": "validation", "row": origin, "prompt": prompt, "wanted": wanted, "answer": answer,
        }))
    };
    asked.iter().zip(&written).map(record).collect()
}

/// `val/loss`, the mean over the tokens that would be trained on, and their number as `val/tokens`. Of several ranks
/// each takes a part, and all know the result. Conversations that are too long are left out, as in training.
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
    Ok(metrics.into())
}
