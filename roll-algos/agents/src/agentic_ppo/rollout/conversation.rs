//! A conversation as tokens. Tokens that the model wrote stay as they are, because training needs exactly these; all
//! other text comes from the chat template.

use roll_core::{Error, Generation, LanguageModel, Message, PICTURE_MARK, Picture, Result, without_picture_marks};

use crate::AgentError;
use crate::agentic_ppo::tools::Tools;
use crate::pieces::tokenize_after;

/// Placeholder for the assistant's words, to find the text that the template writes after them. It consists of
/// private-use characters, which no template treats specially.
const MARK: &str = "\u{f8ff}\u{f8fe}";

/// The messages and tokens of one episode.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// The messages of the current prompt.
    messages: Vec<Message>,
    /// Position of the first token of the current prompt.
    pub begins: usize,
    /// All tokens so far.
    pub tokens: Vec<u32>,
    /// Whether the model wrote each token.
    pub response: Vec<bool>,
    /// Log-probabilities that generation reported, under the distribution it drew from; 0 for tokens that the model
    /// read.
    pub log_probs: Vec<f32>,
    /// Log-probabilities at temperature 1 over the whole vocabulary. The same as `log_probs` if the model does not
    /// report them.
    pub raw_log_probs: Vec<f32>,
    /// Different pictures of the tokens, in the order in which they were first shown.
    pub pictures: Vec<Picture>,
    /// Number of the `pictures` that the latest answer or an earlier one has seen.
    pub answered_pictures: usize,
}

impl Conversation {
    /// Begins a new prompt: the next messages do not follow the messages so far.
    pub fn restart(&mut self) {
        self.messages.clear();
        self.begins = self.tokens.len();
    }

    /// The tokens that the model continues.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[self.begins..]
    }

    /// Adds messages, and the opening of the assistant's answer. After an answer, only the part of the rendered
    /// conversation that follows it is tokenized. The marks of the messages are the places of `pictures`. Without
    /// pictures, marks are replaced.
    pub fn ask(
        &mut self,
        model: &dyn LanguageModel,
        tools: &Tools,
        messages: Vec<Message>,
        pictures: &[Picture],
    ) -> Result<()> {
        let text = match self.messages.split_last() {
            None => {
                self.messages = messages;
                tools.render(model, &self.messages)?
            }
            Some((_answer, before_answer)) => {
                let marked = [before_answer, &[Message::new("assistant", MARK)], messages.as_slice()].concat();
                let rendered = tools.render(model, &marked)?;
                self.messages.extend(messages);
                self.after_answer(model, &rendered)?
            }
        };
        let text = match pictures {
            [] => without_picture_marks(text),
            _ => text,
        };
        let marks = text.matches(PICTURE_MARK).count();
        if marks != pictures.len() {
            return Err(AgentError::PicturesOfPrompt { pictures: pictures.len(), marks }.into());
        }
        // The first new token may depend on the text before it, of which the last token is enough.
        let preceding = match self.prompt().last() {
            Some(last) => model.detokenize(&[*last])?,
            None => String::new(),
        };
        let tokens = tokenize_after(model, &preceding, &text, pictures)?;
        for picture in pictures {
            if !self.pictures.contains(picture) {
                self.pictures.push(picture.clone());
            }
        }
        self.response.extend(std::iter::repeat_n(false, tokens.len()));
        self.log_probs.extend(std::iter::repeat_n(0.0, tokens.len()));
        self.raw_log_probs.extend(std::iter::repeat_n(0.0, tokens.len()));
        self.tokens.extend(tokens);
        Ok(())
    }

    /// The part of `rendered` that follows the assistant's words. If the model wrote an end of turn itself, the
    /// template's is left out.
    fn after_answer(&self, model: &dyn LanguageModel, rendered: &str) -> Result<String> {
        let Some(mark) = rendered.rfind(MARK) else {
            let problem =
                "the chat template leaves out the assistant's messages: several turns are not possible with it";
            return Err(Error::Unsupported(problem.into()));
        };
        let rest = &rendered[mark + MARK.len()..];
        let ends = model.end_tokens();
        if !self.tokens.last().is_some_and(|id| ends.contains(id)) {
            return Ok(rest.to_string());
        }
        // The template may write another end token than the model did, and blanks before it.
        for end in ends {
            let end = model.detokenize(&[end])?;
            let is_visible = !end.trim().is_empty();
            if is_visible && let Some(after) = rest.trim_start().strip_prefix(end.as_str()) {
                return Ok(after.to_string());
            }
        }
        Ok(rest.to_string())
    }

    /// Adds the assistant's answer; returns its text.
    pub fn answer(&mut self, model: &dyn LanguageModel, generation: &Generation) -> Result<String> {
        let raw = if generation.raw_log_probs.is_empty() { &generation.log_probs } else { &generation.raw_log_probs };
        let tokens = generation.tokens.len();
        if let Some(found) = [&generation.log_probs, raw].map(Vec::len).into_iter().find(|found| *found != tokens) {
            return Err(Error::Misuse(format!("the model reports {found} log-probabilities of {tokens} tokens")));
        }
        // The model may write a mark, and it has no picture.
        let text = without_picture_marks(model.detokenize(&generation.tokens)?);
        self.answered_pictures = self.pictures.len();
        self.messages.push(Message::new("assistant", text.clone()));
        self.response.extend(std::iter::repeat_n(true, generation.tokens.len()));
        self.log_probs.extend(&generation.log_probs);
        self.raw_log_probs.extend(raw);
        self.tokens.extend(&generation.tokens);
        Ok(text)
    }

    /// Positions of `shown` in [`Self::pictures`]. A picture that was not shown has none.
    pub fn positions(&self, shown: &[Picture]) -> Vec<usize> {
        shown.iter().filter_map(|picture| self.pictures.iter().position(|known| known == picture)).collect()
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_testing::{Bigram, Scripted, Texts};

    use super::*;

    /// A model whose turns end with `$` or `%`, and whose chat template writes `end` after an answer.
    struct Ends {
        letters: Bigram,
        end: &'static str,
    }

    impl Texts for Ends {
        fn letters(&self) -> &Bigram {
            &self.letters
        }

        fn render_chat(&self, messages: &[Message], _: bool) -> Result<String> {
            let turn = |m: &Message| match m.role.as_str() {
                "assistant" => format!("{}{}", m.content, self.end),
                _ => format!("[{}]", m.content),
            };
            Ok(messages.iter().map(turn).collect())
        }

        fn end_tokens(&self) -> Vec<u32> {
            vec!['$' as u32, '%' as u32]
        }
    }

    /// The conversation with a question, `answer` and another question.
    fn two_turns(letters: Bigram, end: &'static str, answer: &str) -> (Scripted<Ends>, Conversation) {
        let model = Scripted::new(Ends { letters, end }, &[]);
        let (tools, mut conversation) = (Tools::default(), Conversation::default());
        conversation.ask(&model, &tools, vec![Message::new("user", "a")], &[]).unwrap();
        let tokens: Vec<u32> = answer.bytes().map(u32::from).collect();
        let log_probs = vec![0.0; tokens.len()];
        let generation = Generation { tokens, log_probs, raw_log_probs: Vec::new() };
        conversation.answer(&model, &generation).unwrap();
        conversation.ask(&model, &tools, vec![Message::new("user", "c")], &[]).unwrap();
        (model, conversation)
    }

    #[test]
    fn a_turn_has_one_end_whatever_the_template_writes_there() {
        for (end, answer, expected) in [
            ("$", "b$", "[a]b$[c]"),
            // Llama 2's template writes a blank before the end.
            (" $", "b$", "[a]b$[c]"),
            // The model wrote another of its ends.
            ("$", "b%", "[a]b%[c]"),
            (" %\n", "b$", "[a]b$\n[c]"),
            // The model was cut off: the template ends the turn.
            (" $", "b", "[a]b $[c]"),
            // The template ends no turn.
            ("\n", "b$", "[a]b$\n[c]"),
            ("", "b$", "[a]b$[c]"),
        ] {
            let (model, conversation) = two_turns(Bigram::new(), end, answer);
            assert_eq!(model.detokenize(&conversation.tokens).unwrap(), expected, "{end:?} {answer:?}");
            let written: Vec<u32> = conversation
                .tokens
                .iter()
                .zip(&conversation.response)
                .filter(|(_, own)| **own)
                .map(|(id, _)| *id)
                .collect();
            assert_eq!(model.detokenize(&written).unwrap(), answer);
        }
    }

    #[test]
    fn answers_have_one_log_probability_for_each_token() {
        let model = Scripted::new(Ends { letters: Bigram::new(), end: "" }, &[]);
        let answered = |log_probs: usize, raw: usize| {
            let (log_probs, raw_log_probs) = (vec![0.0; log_probs], vec![0.0; raw]);
            let generation = Generation { tokens: vec!['a' as u32; 2], log_probs, raw_log_probs };
            Conversation::default().answer(&model, &generation).map_err(|error| error.to_string())
        };
        for accepted in [(2, 0), (2, 2)] {
            assert!(answered(accepted.0, accepted.1).is_ok(), "{accepted:?}");
        }
        for ((log_probs, raw), found) in [((3, 2), 3), ((2, 3), 3), ((1, 2), 1), ((2, 1), 1), ((3, 0), 3)] {
            let problem = answered(log_probs, raw).unwrap_err();
            assert!(problem.contains(&format!("reports {found} log-probabilities of 2 tokens")), "{problem}");
        }
    }

    #[test]
    fn no_blank_is_added_between_turns() {
        let mut letters = Bigram::new();
        letters.adds_blank = true;
        let (model, conversation) = two_turns(letters, "", "b");
        assert_eq!(model.detokenize(&conversation.tokens).unwrap(), " [a]b[c]");
    }
}
