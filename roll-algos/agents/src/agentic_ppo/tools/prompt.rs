//! The text of conversations with tools, by the model's chat template or, if that cannot write tools, by our own words.

use std::sync::Once;

use roll_core::{LanguageModel, Message, Result};

use super::Tools;

/// The role of messages with results of tools.
pub(super) const ROLE: &str = "tool";

/// The message with the result of call number `index` of an answer. Its id has nine letters and digits, as Mistral's
/// templates demand.
pub fn result(index: usize, result: String) -> Message {
    let mut message = Message::new(ROLE, result);
    message.fields.insert("tool_call_id".into(), format!("call{index:05}").into());
    message
}

impl Tools {
    /// The text of a conversation that ends where the assistant speaks next. If the chat template cannot write tools,
    /// their descriptions are part of the first message, and their results are messages of the user.
    pub fn render(&self, model: &dyn LanguageModel, messages: &[Message]) -> Result<String> {
        let continue_as_assistant = true;
        if self.is_empty() {
            return model.render_chat(messages, continue_as_assistant);
        }
        let has_template = *self.has_template.get_or_init(|| self.fits_template(model));
        if has_template {
            let text = model.render_chat_with_tools(messages, &self.descriptions, continue_as_assistant)?;
            if let Some(text) = text {
                return Ok(text);
            }
        }
        model.render_chat(&self.without_template(messages), continue_as_assistant)
    }

    /// Whether the chat template writes a conversation with tools, a result and two answers completely. Some templates
    /// refuse a result whose call they did not write themselves; here calls are part of the text of the agent's
    /// answers.
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

    /// The conversation `messages` for a template without tools: descriptions of the tools in the first message, and
    /// results as messages of the user.
    fn without_template(&self, messages: &[Message]) -> Vec<Message> {
        let mut written: Vec<Message> = Vec::new();
        let mut previous_role = "";
        for message in messages {
            let follows_result = message.role == ROLE && previous_role == ROLE;
            previous_role = &message.role;
            if message.role != ROLE {
                written.push(message.clone());
                continue;
            }
            let result = format!("<tool_response>\n{}\n</tool_response>", message.content);
            match written.last_mut() {
                // One message for consecutive results, because many templates want user and assistant to alternate.
                Some(last) if follows_result => last.content = format!("{}\n{result}", last.content),
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

    /// The words that describe the tools and the form of calls.
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
