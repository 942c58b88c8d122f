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
/// Number of characters of a prompt that a record has, from its end.
const PROMPT_CHARACTERS: usize = 1500;

/// A held-out conversation up to its last answer, which the model is to write.
struct Question {
    /// Position of the conversation.
    row: usize,
    prompt: Vec<u32>,
    /// The answer in the data.
    wanted: Vec<u32>,
}

/// Lets the model write the last answer of each of the first conversations by greedy decoding, and returns it with the
/// answer in the data as lines for `trajectories.jsonl`. Returns no lines if all tokens are trained on, because then
/// nothing is a prompt.
pub(super) fn answers(
    config: &SftConfig,
    held_out: &Conversations,
    step: u64,
    model: &mut dyn Model,
    progress: &dyn Progress,
) -> Result<Vec<Value>> {
    let (model, mut questions) = (language(model, NAME)?, Vec::new());
    let rows = if config.train_on == TrainOn::All { 0 } else { held_out.len().min(ANSWERED) };
    for row in 0..rows {
        let samples = held_out.samples(row, config.train_on, model)?;
        let last_sample = samples.into_iter().rfind(|sample| sample.is_usable(config.limit(model)));
        if let Some([prompt, wanted]) = last_sample.and_then(Tokens::last_answer) {
            questions.push(Question { row, prompt, wanted });
        }
    }
    if questions.is_empty() {
        return Ok(Vec::new());
    }
    progress.phase("answering held-out conversations");
    let prompts: Vec<Vec<u32>> = questions.iter().map(|question| question.prompt.clone()).collect();
    let limits = prompts.iter().map(|prompt| model.context_length().saturating_sub(prompt.len())).collect();
    let written = model.generate(&prompts, &Sampling { limits, ..Sampling::greedy(ANSWER_TOKENS) })?;
    let mut records = Vec::with_capacity(questions.len());
    for (question, generation) in questions.iter().zip(&written) {
        let prompt = model.detokenize(&question.prompt)?;
        let shown_from = prompt.char_indices().rev().nth(PROMPT_CHARACTERS - 1).map_or(0, |(at, _)| at);
        let (wanted, answer) = (model.detokenize(&question.wanted)?, model.detokenize(&generation.tokens)?);
        let (origin, prompt) = (held_out.origin(question.row), &prompt[shown_from..]);
        records.push(json!({
            "step": step, "kind": "validation", "row": origin, "prompt": prompt, "wanted": wanted, "answer": answer,
        }));
    }
    Ok(records)
}

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
        negative_log_likelihood += evaluate(model, chunk, Grad::Skip)?.sums.negative_log_likelihood;
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
