//! Conversations with tools, as the model reads them.

use std::sync::Once;

use roll_core::{LanguageModel, Message, Result};

use super::Tools;

/// The role of messages with results.
pub(super) const ROLE: &str = "tool";

/// The message with the result of a turn's call `index`. Its id has nine letters and digits, as Mistral's templates demand.
pub fn result(index: usize, result: String) -> Message {
    let mut message = Message::new(ROLE, result);
    message.fields.insert("tool_call_id".into(), format!("call{index:05}").into());
    message
}

impl Tools {
    /// The text of a conversation: as the chat template writes it with tools, or, where it cannot carry them, with their
    /// description in the first message and their results as the user's.
    pub fn render(&self, model: &dyn LanguageModel, messages: &[Message]) -> Result<String> {
        if self.is_empty() {
            return model.render_chat(messages, true);
        }
        let by_template = match self.has_template.get_or_init(|| self.fits_template(model)) {
            true => model.render_chat_with_tools(messages, &self.descriptions, true)?,
            false => None,
        };
        match by_template {
            Some(text) => Ok(text),
            None => model.render_chat(&self.without_template(messages), true),
        }
    }

    /// Whether the chat template writes two turns with a call and its result, both answers included. Some refuse results
    /// whose call they have not written themselves.
    fn fits_template(&self, model: &dyn LanguageModel) -> bool {
        let answers = ["\u{f8ff}1", "\u{f8ff}2"].map(|answer| Message::new("assistant", answer));
        let [first, second] = answers.clone();
        let turns = [Message::new("user", "a"), first, result(0, "1".into()), second, Message::new("user", "b")];
        let why = match model.render_chat_with_tools(&turns, &self.descriptions, true) {
            Ok(None) => return false,
            Ok(Some(text)) if answers.iter().all(|answer| text.contains(&answer.content)) => return true,
            Ok(Some(_)) => "it leaves out the agent's answers".to_string(),
            Err(error) => error.chain(),
        };
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            tracing::warn!(
                "the model's chat template cannot carry calls of tools and their results ({why}); the first message \
                 describes the tools instead"
            );
        });
        false
    }

    fn without_template(&self, messages: &[Message]) -> Vec<Message> {
        let mut written: Vec<Message> = Vec::new();
        let mut before = "";
        for message in messages {
            let joins = message.role == ROLE && before == ROLE;
            before = &message.role;
            if message.role != ROLE {
                written.push(message.clone());
                continue;
            }
            let result = format!("<tool_response>\n{}\n</tool_response>", message.content);
            match written.last_mut() {
                // Many templates want users and assistants to take turns.
                Some(last) if joins => last.content = format!("{}\n{result}", last.content),
                _ => written.push(Message::new("user", result)),
            }
        }
        if let Some(first) = written.first_mut() {
            let description = self.description();
            first.content = match first.role.as_str() {
                "system" => format!("{}\n\n{description}", first.content),
                _ => format!("{description}\n\n{}", first.content),
            };
        }
        written
    }

    fn description(&self) -> String {
        let tools: Vec<String> = self.descriptions.iter().map(|tool| tool.to_string()).collect();
        format!(
            "You may call tools before you answer. Each has a description in JSON:\n<tools>\n{}\n</tools>\nTo call \
             one, write its name and arguments:\n<tool_call>\n{{\"name\": \"...\", \"arguments\": {{...}}}}\n</tool_call>\n\
             The result comes back between <tool_response> and </tool_response>.",
            tools.join("\n")
        )
    }
}
