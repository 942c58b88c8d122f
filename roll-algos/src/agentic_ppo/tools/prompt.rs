//! Conversations with tools, as the model reads them.

use roll_core::{LanguageModel, Message, Result};

use super::Tools;

/// The role of messages with results.
pub const ROLE: &str = "tool";

impl Tools {
    /// The text of a conversation: as the chat template writes it with tools, or, where it knows none, with their
    /// description in the first message and their results as the user's.
    pub fn render(&self, model: &dyn LanguageModel, messages: &[Message]) -> Result<String> {
        if self.is_empty() {
            return model.render_chat(messages, true);
        }
        match model.render_chat_with_tools(messages, &self.descriptions, true)? {
            Some(text) => Ok(text),
            None => model.render_chat(&self.without_template(messages), true),
        }
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
