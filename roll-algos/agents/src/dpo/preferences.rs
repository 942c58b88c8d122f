//! Preferences: pairs of answers to one prompt, read from a file, rendered by the chat template and tokenized.

use std::path::Path;

use roll_core::{Error, LanguageModel, Result};
use roll_external::Fingerprint;

use super::rows;
use crate::conversations::{self, Conversation, Conversations, Reader, Tokens, TrainOn};

/// The pairs of a file, in memory. The conversations of a pair have the same position.
#[derive(Clone, Debug, Default)]
pub struct Preferences {
    chosen: Conversations,
    rejected: Conversations,
}

/// A pair as tokens.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    /// Position of the pair in its file.
    pub row: usize,
    /// The samples of the conversations with the chosen and with the rejected answer. The tokens that count are marked:
    /// those of answers after the messages that both have.
    pub answers: [Vec<Tokens>; 2],
}

impl Pair {
    /// Number of tokens of each answer.
    pub(super) fn tokens(&self) -> [usize; 2] {
        [0, 1].map(|side| self.answers[side].iter().map(Tokens::trained).sum())
    }

    /// Number of tokens of the longest sample.
    pub(super) fn longest(&self) -> usize {
        self.answers.iter().flatten().map(|sample| sample.ids.len()).max().unwrap_or(0)
    }
}

impl Preferences {
    /// The same for files with the same pairs in the same order.
    pub(super) fn fingerprint(&self) -> String {
        let [chosen, rejected] = [&self.chosen, &self.rejected].map(Conversations::identity);
        Fingerprint::new("preferences").text("chosen", chosen).text("rejected", rejected).finish()
    }

    /// Reads JSON lines (empty lines are skipped) or a JSON list. Pairs without a difference are left out, with a
    /// warning. Fails on an entry that is not a pair, and on a file without pairs.
    pub fn read(file: &Path) -> Result<Self> {
        let mut reader = Reader::default();
        let (mut same, mut first_same) = (0, None);
        let rows = conversations::read_rows(file, "preferences", rows::EXPECTED, |place, row| {
            let [chosen, rejected] = rows::conversations(row)?;
            let mut read = |side: &str, row| {
                let row =
                    conversations::normalised(row).and_then(|row| reader.read(&format!("{place}, `{side}`"), row));
                row.map_err(|problem| format!("`{side}`: {problem}"))
            };
            let pair = paired(read("chosen", chosen)?, read("rejected", rejected)?)?;
            if pair.is_none() {
                same += 1;
                first_same.get_or_insert_with(|| place.to_string());
            }
            Ok(pair)
        })?;
        let all = rows.len();
        let (chosen, rejected): (Vec<Conversation>, Vec<Conversation>) = rows.into_iter().flatten().unzip();
        reader.warn(file, "`prompt`, `chosen`, `rejected`, `system` and `tools`", chosen.iter().chain(&rejected));
        if let Some(place) = first_same {
            tracing::warn!(
                "{}: {same} of {all} pairs are left out, because `chosen` and `rejected` are the same; the first is {place}",
                file.display()
            );
        }
        if chosen.is_empty() {
            let problem = format!("expected pairs of different answers, such as {}; found none", rows::EXPECTED);
            return Err(Error::bad_file(file, problem));
        }
        Ok(Self { chosen: Conversations::new(file, chosen), rejected: Conversations::new(file, rejected) })
    }

    /// Number of pairs.
    pub(super) fn len(&self) -> usize {
        self.chosen.len()
    }

    /// File and place of a pair, for messages.
    pub(super) fn origin(&self, row: usize) -> String {
        self.chosen.origin(row).trim_end_matches(", `chosen`").to_string()
    }

    /// The conversations with the chosen answers.
    pub(super) fn chosen(&self) -> &Conversations {
        &self.chosen
    }

    /// The number of these prompts with their chosen answers that `other` contains, too.
    pub(super) fn count_in(&self, other: &Self) -> usize {
        self.chosen.count_in(&other.chosen)
    }

    /// Renders every pair, so that an invalid one is found before the first step. Fails also if no pair can be trained
    /// on. `key` is the option that names the file.
    pub(super) fn check(&mut self, key: &str, limit: usize, model: &dyn LanguageModel) -> Result<()> {
        let (mut any_usable, mut reason) = (false, String::new());
        for row in 0..self.len() {
            for conversations in [&mut self.chosen, &mut self.rejected] {
                conversations.settle(row, TrainOn::Responses, model)?;
            }
            // Tokenizing is much slower than rendering, and is left out once a usable pair is found.
            if !any_usable {
                match self.pair(row, limit, model)? {
                    Ok(_) => any_usable = true,
                    Err(problem) => reason = problem,
                }
            }
        }
        if any_usable {
            return Ok(());
        }
        let problem = format!(
            "no pair of {} can be trained on within {limit} tokens (`algo.sequence_length`); the last one: {reason}",
            self.chosen.file().display()
        );
        Err(Error::config(key, problem))
    }

    /// The tokens of a pair, or the reason why it is left out.
    pub(super) fn pair(&self, row: usize, limit: usize, model: &dyn LanguageModel) -> Result<Result<Pair, String>> {
        let samples = |of: &Conversations| of.samples(row, TrainOn::Responses, model);
        let pair = Pair { row, answers: [samples(&self.chosen)?, samples(&self.rejected)?] };
        let (longest, tokens) = (pair.longest(), pair.tokens());
        Ok(if longest > limit {
            Err(format!("{longest} tokens are more than the {limit} allowed"))
        } else if tokens.contains(&0) {
            Err("an answer has no token".into())
        } else if pair.answers[0] == pair.answers[1] {
            Err("the chat template writes both answers alike".into())
        } else {
            Ok(pair)
        })
    }
}

/// Marks the answers after the messages that both conversations begin with, which alone are trained on. `None`: they do
/// not differ.
fn paired(
    mut chosen: Conversation,
    mut rejected: Conversation,
) -> Result<Option<(Conversation, Conversation)>, String> {
    let common = chosen.common_messages(&rejected);
    let mut differ = false;
    for (side, conversation) in [("chosen", &mut chosen), ("rejected", &mut rejected)] {
        match conversation.roles().nth(common) {
            Some("assistant") => differ = true,
            Some(role) => {
                let problem = format!(
                    "`{side}`: message {}: the first difference is one of the role `{role}`: expected different answers \
                     of the assistant to the same prompt",
                    common + 1
                );
                return Err(problem);
            }
            None => {}
        }
    }
    if !differ {
        return Ok(None);
    }
    for (side, conversation) in [("chosen", &mut chosen), ("rejected", &mut rejected)] {
        if !conversation.train_after(common) {
            return Err(format!("`{side}`: expected an answer of the assistant after message {common}, found none"));
        }
    }
    Ok(Some((chosen, rejected)))
}
