//! Conversations on disk, and as tokens of which some are trained on.

use std::path::{Path, PathBuf};

use roll_core::{Error, LanguageModel, Message, Result};
use roll_external::files;

use super::{SftConfig, TrainOn};

/// Larger files are refused: they are held in memory.
const MAX_BYTES: u64 = 4 << 30;

/// Roles of messages in chat templates. Data sets of another form have others (`human`, `gpt`), and nothing of them
/// would be trained on.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// Contents of one line.
#[derive(serde::Deserialize)]
struct Line {
    messages: Vec<Message>,
}

/// The conversations of a file, in memory.
#[derive(Clone, Debug, Default)]
pub struct Conversations {
    file: PathBuf,
    /// Number of the line, from 1, and its messages.
    rows: Vec<(usize, Vec<Message>)>,
}

/// A conversation as tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokens {
    /// Ids.
    pub ids: Vec<u32>,
    /// Which of them are trained on.
    pub train: Vec<bool>,
}

impl Tokens {
    /// Number of tokens that are predicted and trained on; the first is not predicted.
    pub fn trained(&self) -> usize {
        self.train.iter().skip(1).filter(|train| **train).count()
    }
}

impl Conversations {
    /// Reads JSON lines; empty lines are left aside. Fails on a line that is no conversation, and on a file without
    /// any.
    pub fn read(file: &Path) -> Result<Self> {
        let text = files::read_text(file, MAX_BYTES).map_err(Error::file("read", file))?;
        let mut rows = Vec::new();
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let bad = |problem: String| Error::bad_file(file, format!("line {}: {problem}", i + 1));
            let line: Line =
                serde_json::from_str(line).map_err(|e| bad(format!("expected an object with `messages`: {e}")))?;
            if line.messages.is_empty() {
                return Err(bad("expected at least one message, found none".into()));
            }
            if let Some(other) = line.messages.iter().find(|message| !ROLES.contains(&message.role.as_str())) {
                return Err(bad(format!("the role `{}` is not known; known: {}", other.role, ROLES.join(", "))));
            }
            rows.push((i + 1, line.messages));
        }
        match rows.is_empty() {
            true => Err(Error::bad_file(file, "expected conversations, one a line; found none")),
            false => Ok(Self { file: file.into(), rows }),
        }
    }

    /// Fails on a conversation that the chat template cannot write, and if none can be trained on; `key` names the file.
    pub(super) fn check(&self, key: &str, config: &SftConfig, model: &dyn LanguageModel) -> Result<()> {
        let (limit, mut is_usable) = (config.limit(model), false);
        for row in 0..self.len() {
            match is_usable {
                // Writing is much faster than counting tokens.
                true => drop(self.parts(row, config.train_on, model)?),
                false => {
                    let tokens = self.tokens(row, config.train_on, model)?;
                    is_usable = tokens.ids.len() <= limit && tokens.trained() > 0;
                }
            }
        }
        match is_usable {
            true => Ok(()),
            false => {
                let problem = format!(
                    "no conversation of {} has a token that is trained on, within {limit} tokens (`algo.sequence_length`)",
                    self.file.display()
                );
                Err(Error::config(key, problem))
            }
        }
    }

    /// Number of conversations.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no conversation.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The place of a row, for messages.
    pub fn origin(&self, row: usize) -> String {
        format!("{}:{}", self.file.display(), self.rows[row].0)
    }

    /// The tokens of a row. The assistant's words are tokenized apart from those around them, as they are when it acts.
    pub fn tokens(&self, row: usize, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Tokens> {
        let mut tokens = Tokens { ids: Vec::new(), train: Vec::new() };
        for (text, train) in self.parts(row, train_on, model)? {
            let ids = model.tokenize(&text)?;
            tokens.train.extend(std::iter::repeat_n(train, ids.len()));
            tokens.ids.extend(ids);
        }
        Ok(tokens)
    }

    /// The text of a row in parts, and which of them are trained on.
    fn parts(&self, row: usize, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Vec<(String, bool)>> {
        let messages = &self.rows[row].1;
        let whole = model.render_chat(messages, false)?;
        let (mut parts, mut done) = (Vec::new(), 0);
        let all = train_on == TrainOn::All;
        for (i, _) in messages.iter().enumerate().filter(|(_, m)| m.role == "assistant") {
            let (before, after) =
                (model.render_chat(&messages[..i], true)?, model.render_chat(&messages[..=i], false)?);
            let prompt = whole.starts_with(&before).then(|| whole.get(done..before.len())).flatten();
            let answer = whole.starts_with(&after).then(|| whole.get(before.len()..after.len())).flatten();
            let (Some(prompt), Some(answer)) = (prompt, answer) else {
                let problem = format!(
                    "line {}: the chat template writes message {} differently once more messages follow: give each of \
                     its answers a conversation of its own",
                    self.rows[row].0,
                    i + 1
                );
                return Err(Error::bad_file(&self.file, problem));
            };
            parts.extend([(prompt.to_string(), all), (answer.to_string(), true)]);
            done = after.len();
        }
        parts.push((whole[done..].to_string(), all));
        Ok(parts)
    }
}
