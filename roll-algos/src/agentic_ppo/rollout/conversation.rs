//! A conversation as tokens: the model's own stay as they are, the rest comes from the chat template.

use roll_core::{Error, Generation, LanguageModel, Message, Result};

use crate::agentic_ppo::tools::Tools;

/// Stands for the assistant's words when the template is asked for the text after them. Private-use characters, so that
/// no template and no tokenizer treats them specially.
const MARK: &str = "\u{f8ff}\u{f8fe}";

/// Tokens of one episode.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    messages: Vec<Message>,
    /// Where the prompt under way begins in the tokens.
    pub begins: usize,
    /// All tokens so far.
    pub tokens: Vec<u32>,
    /// Which of them the model wrote.
    pub response: Vec<bool>,
    /// Log-probabilities that generation reported, under the distribution it drew from; 0 for the others.
    pub log_probs: Vec<f32>,
    /// Log-probabilities at temperature 1 over the whole vocabulary; those of `log_probs` if the model does not report
    /// them.
    pub raw_log_probs: Vec<f32>,
}

impl Conversation {
    /// Forgets the messages so far: the next are a prompt of their own.
    pub fn restart(&mut self) {
        self.messages.clear();
        self.begins = self.tokens.len();
    }

    /// The tokens that the model continues.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[self.begins..]
    }

    /// Adds messages, and the opening of the assistant's answer.
    pub fn ask(&mut self, model: &dyn LanguageModel, tools: &Tools, messages: Vec<Message>) -> Result<()> {
        let text = match self.messages.is_empty() {
            true => {
                self.messages = messages;
                tools.render(model, &self.messages)?
            }
            false => {
                let with_mark =
                    [&self.messages[..self.messages.len() - 1], &[Message::new("assistant", MARK)]].concat();
                let asked = tools.render(model, &[with_mark, messages.clone()].concat())?;
                self.messages.extend(messages);
                self.after_answer(model, &asked)?
            }
        };
        let tokens = model.tokenize(&text)?;
        self.response.extend(std::iter::repeat_n(false, tokens.len()));
        self.log_probs.extend(std::iter::repeat_n(0.0, tokens.len()));
        self.raw_log_probs.extend(std::iter::repeat_n(0.0, tokens.len()));
        self.tokens.extend(tokens);
        Ok(())
    }

    /// The part of `rendered` that follows the assistant's words, without the end of turn that the model wrote itself.
    fn after_answer(&self, model: &dyn LanguageModel, rendered: &str) -> Result<String> {
        let Some(at) = rendered.rfind(MARK) else {
            let problem =
                "the chat template leaves out the assistant's messages: several turns are not possible with it";
            return Err(Error::Unsupported(problem.into()));
        };
        let rest = &rendered[at + MARK.len()..];
        let ends = model.end_tokens();
        if !self.tokens.last().is_some_and(|id| ends.contains(id)) {
            return Ok(rest.to_string());
        }
        // The template may write another of the ends, and blanks before it.
        for end in ends {
            let end = model.detokenize(&[end])?;
            if let Some(after) = rest.trim_start().strip_prefix(end.as_str()).filter(|_| !end.trim().is_empty()) {
                return Ok(after.to_string());
            }
        }
        Ok(rest.to_string())
    }

    /// Adds the assistant's answer; returns its text.
    pub fn answer(&mut self, model: &dyn LanguageModel, generation: &Generation) -> Result<String> {
        let raw = if generation.raw_log_probs.is_empty() { &generation.log_probs } else { &generation.raw_log_probs };
        let (tokens, log_probs) = (generation.tokens.len(), generation.log_probs.len().min(raw.len()));
        if tokens != log_probs || raw.len() != tokens {
            return Err(Error::Misuse(format!("the model reports {log_probs} log-probabilities of {tokens} tokens")));
        }
        let text = model.detokenize(&generation.tokens)?;
        self.messages.push(Message::new("assistant", text.clone()));
        self.response.extend(std::iter::repeat_n(true, generation.tokens.len()));
        self.log_probs.extend(&generation.log_probs);
        self.raw_log_probs.extend(raw);
        self.tokens.extend(&generation.tokens);
        Ok(text)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }
}
