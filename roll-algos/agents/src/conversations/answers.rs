//! Answers of a model to conversations that are not trained on.

use roll_core::{LanguageModel, Progress, Result, Sampling};
use serde_json::{Value, json};

use super::{Conversations, Tokens, TrainOn};

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
/// answer in the data as lines for `trajectories.jsonl`. Conversations of more than `limit` tokens are left out.
pub(crate) fn answers(
    held_out: &Conversations,
    limit: usize,
    step: u64,
    model: &mut dyn LanguageModel,
    progress: &dyn Progress,
) -> Result<Vec<Value>> {
    let mut questions = Vec::new();
    for row in 0..held_out.len().min(ANSWERED) {
        let samples = held_out.samples(row, TrainOn::Responses, model)?;
        let last_sample = samples.into_iter().rfind(|sample| sample.is_usable(limit));
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
    let written =
        model.generate(&prompts, &Sampling { limits, is_last_turn: true, ..Sampling::greedy(ANSWER_TOKENS) })?;
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
