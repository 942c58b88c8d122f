//! Requests of `/v1/chat/completions` and their answers.

use roll_core::{ChatRequest, Message, PICTURE_MARK, Picture, without_picture_marks};
use serde_json::{Map, Value, json};

use crate::agentic_ppo::tools::parse_calls;
use crate::pictures::{SentPictures, from_data_url};

/// Fields of an assistant's message that clients send back and that say nothing to the model.
const WITHOUT_MEANING: [&str; 4] = ["refusal", "annotations", "audio", "function_call"];

/// The conversation of an episode, as its program sees it: by it, a request is recognised that goes on where the latest
/// answer ended.
#[derive(Debug, Default)]
pub struct Dialogue {
    /// Messages of the latest request, and its answer.
    messages: Vec<Message>,
    /// Pictures of these messages, one for each mark in them.
    pictures: Vec<Picture>,
    tools: Vec<Value>,
}

impl Dialogue {
    /// Reads a request. It goes on with the text so far if it has the same tools, and if its messages begin with those
    /// of the latest request and the answer to it, unchanged but for blanks at their ends. Otherwise a new text begins.
    ///
    /// # Errors
    /// The message for the program, if the endpoint cannot do what it asks for.
    pub fn read(&mut self, request: &Value) -> Result<ChatRequest, String> {
        if request["stream"] == true {
            return Err("this endpoint does not stream: leave `stream` out".into());
        }
        if request["n"].as_u64().is_some_and(|n| n != 1) {
            return Err("this endpoint writes one answer to a request: leave `n` out".into());
        }
        let list = request["messages"].as_array().filter(|messages| !messages.is_empty());
        let list = list.ok_or("`messages` must be a list with a message")?;
        let mut pictures = SentPictures::default();
        let read = |value| message(value, &mut pictures);
        let messages = list.iter().map(read).collect::<Result<Vec<Message>, String>>()?;
        let pictures = pictures.into_vec();
        let tools = match request.get("tools") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(tools)) => tools.clone(),
            Some(_) => return Err("`tools` must be a list".into()),
        };
        let begins_alike = messages.iter().zip(&self.messages).all(|(new, old)| is_same(new, old));
        let shows_alike = pictures.starts_with(&self.pictures);
        let goes_on = !self.messages.is_empty() && messages.len() > self.messages.len() && begins_alike && shows_alike;
        let known = if goes_on && tools == self.tools { self.messages.len() } else { 0 };
        (self.messages, self.pictures, self.tools) = (messages.clone(), pictures.clone(), tools.clone());
        let limit = ["max_completion_tokens", "max_tokens"].iter().find_map(|key| request[*key].as_u64());
        Ok(ChatRequest { messages, pictures, known, tools, max_tokens: limit.map(|limit| limit as usize) })
    }

    /// Adds the model's answer, and returns the completion for the program. Calls of tools are read from the text if the
    /// request has tools.
    pub fn answer(&mut self, request: &Value, text: &str, number: u64) -> Value {
        let calls = if self.tools.is_empty() { Vec::new() } else { tool_calls(text) };
        let mut answer = Message::new("assistant", text);
        if !calls.is_empty() {
            // What precedes the first call in the form of Hermes and Qwen; other forms have calls alone.
            let before = text.split_once("<tool_call>").map_or("", |(before, _)| before);
            answer.content = before.trim().into();
            answer.fields.insert("tool_calls".into(), calls.into());
        }
        let mut message = json!({ "role": "assistant", "content": answer.content });
        if let Some(calls) = answer.fields.get("tool_calls") {
            message["tool_calls"] = calls.clone();
            if answer.content.is_empty() {
                message["content"] = Value::Null;
            }
        }
        let reason = if answer.fields.is_empty() { "stop" } else { "tool_calls" };
        self.messages.push(answer);
        json!({
            "id": format!("chatcmpl-{number}"), "object": "chat.completion", "created": 0, "model": request["model"],
            "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": reason}],
        })
    }
}

/// The valid calls of an answer, as completions have them.
fn tool_calls(text: &str) -> Vec<Value> {
    let calls = parse_calls(text).into_iter().flatten().enumerate();
    let completed = calls.map(|(i, call)| {
        let function = json!({ "name": call["name"], "arguments": call["arguments"].to_string() });
        json!({ "id": format!("call{i:05}"), "type": "function", "function": function })
    });
    completed.collect()
}

/// Whether two messages say the same to the model.
fn is_same(one: &Message, other: &Message) -> bool {
    one.role == other.role && one.content.trim() == other.content.trim() && one.fields == other.fields
}

/// Reads a message. Contents in parts are joined, with a mark in place of a picture.
fn message(value: &Value, pictures: &mut SentPictures) -> Result<Message, String> {
    let mut fields: Map<String, Value> = value.as_object().ok_or("each message must be an object")?.clone();
    let role =
        fields.remove("role").and_then(|role| role.as_str().map(String::from)).ok_or("a message has no `role`")?;
    let content = match fields.remove("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => without_picture_marks(text),
        Some(Value::Array(parts)) => {
            let parts: Result<Vec<String>, String> = parts.iter().map(|part| content_part(part, pictures)).collect();
            parts?.concat()
        }
        Some(_) => return Err("`content` must be a text".into()),
    };
    fields.retain(|name, value| !value.is_null() && !WITHOUT_MEANING.contains(&name.as_str()));
    Ok(Message { role, content, fields })
}

/// The text of a part of a message: a mark for a picture, which is added to `pictures`.
fn content_part(part: &Value, pictures: &mut SentPictures) -> Result<String, String> {
    let text = |key: &str| part[key].as_str().ok_or_else(|| format!("a part of a message has no `{key}`"));
    match part["type"].as_str() {
        Some("text") => Ok(without_picture_marks(text("text")?)),
        Some("image_url") => {
            let url = part["image_url"]["url"].as_str().ok_or("a picture has no `image_url.url`")?;
            pictures.push(from_data_url(url))?;
            Ok(PICTURE_MARK.into())
        }
        _ => Err("the model reads texts and pictures alone: a message has a part of another type".into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Tensor;

    use super::*;
    use crate::pictures::to_data_url;

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }

    fn shown(url: &str, text: &str) -> Value {
        let picture = json!({"type": "image_url", "image_url": {"url": url}});
        json!({"role": "user", "content": [picture, {"type": "text", "text": text}]})
    }

    #[test]
    fn pictures_are_part_of_a_conversation() {
        let url =
            |value: u8| to_data_url(&Picture::new(Tensor::new(vec![value; 3], [1, 1, 3]).unwrap()).unwrap()).unwrap();
        let known = |first: &str, again: &str| {
            let mut dialogue = Dialogue::default();
            let request = json!({"messages": [shown(first, "where \u{fffc}?")]});
            let read = dialogue.read(&request).unwrap();
            assert_eq!((read.messages[0].content.as_str(), read.pictures.len()), ("\u{fffc}where \u{fffd}?", 1));
            let answer = dialogue.answer(&request, "b", 0)["choices"][0]["message"].clone();
            let messages = json!([shown(again, "where \u{fffc}?"), answer, shown(&url(9), "and here?")]);
            let read = dialogue.read(&json!({ "messages": messages })).unwrap();
            assert_eq!(read.pictures.len(), 2);
            read.known
        };
        assert_eq!(known(&url(1), &url(1)), 2);
        assert_eq!(known(&url(1), &url(2)), 0, "another picture is another conversation");
    }

    #[test]
    fn a_request_goes_on_if_it_repeats_what_was_said() {
        let said = |messages: Value| {
            let mut dialogue = Dialogue::default();
            let first = json!({"model": "policy", "messages": [user("a")]});
            assert_eq!(dialogue.read(&first).unwrap().known, 0);
            let answer = dialogue.answer(&first, "b \n", 7);
            assert_eq!(answer["choices"][0]["message"], json!({"role": "assistant", "content": "b \n"}));
            assert_eq!(
                (answer["model"].as_str(), answer["choices"][0]["finish_reason"].as_str()),
                (Some("policy"), Some("stop"))
            );
            dialogue.read(&json!({ "messages": messages })).unwrap().known
        };
        // As it was, as the `openai` client writes it, without blanks at the end, in parts.
        for answer in [
            json!({"role": "assistant", "content": "b \n"}),
            json!({"role": "assistant", "content": "b \n", "refusal": null, "annotations": [], "tool_calls": null}),
            json!({"role": "assistant", "content": "b"}),
            json!({"role": "assistant", "content": [{"type": "text", "text": "b"}]}),
        ] {
            assert_eq!(said(json!([user("a"), answer, user("c")])), 2);
        }
        let answer = json!({"role": "assistant", "content": "b"});
        for other in [
            json!([user("a")]),
            json!([user("a"), answer]),
            json!([user("x"), answer, user("c")]),
            json!([user("a"), {"role": "assistant", "content": "summary"}, user("c")]),
            json!([user("c"), user("a"), answer]),
        ] {
            assert_eq!(said(other.clone()), 0, "{other}");
        }
    }

    #[test]
    fn calls_of_tools_cross_both_ways() {
        let tools = json!([{"type": "function", "function": {"name": "add", "parameters": {}}}]);
        let mut dialogue = Dialogue::default();
        let request = json!({"messages": [user("a")], "tools": tools, "max_tokens": 5});
        let read = dialogue.read(&request).unwrap();
        assert_eq!((read.tools.len(), read.max_tokens), (1, Some(5)));
        let text = "I add.<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>";
        let answer = dialogue.answer(&request, text, 0);
        let choice = &answer["choices"][0];
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &json!("I add.")));
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(call["function"], json!({"name": "add", "arguments": "{\"a\":1}"}));
        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "1"});
        let messages = json!([user("a"), choice["message"], result]);
        assert_eq!(dialogue.read(&json!({"messages": messages, "tools": tools})).unwrap().known, 2);
        // Without tools the text is an answer; with other tools, another text begins.
        let mut dialogue = Dialogue::default();
        dialogue.read(&json!({"messages": [user("a")]})).unwrap();
        let answer = dialogue.answer(&json!({}), text, 0);
        assert_eq!(answer["choices"][0]["message"], json!({"role": "assistant", "content": text}));
        let messages = json!([user("a"), answer["choices"][0]["message"], user("c")]);
        assert_eq!(dialogue.read(&json!({"messages": messages, "tools": tools})).unwrap().known, 0);
    }

    #[test]
    fn what_the_endpoint_cannot_do_is_refused_in_words() {
        for (request, word) in [
            (json!({"messages": [user("a")], "stream": true}), "stream"),
            (json!({"messages": [user("a")], "n": 2}), "`n`"),
            (json!({"messages": []}), "`messages`"),
            (json!({"messages": [{"content": "a"}]}), "`role`"),
            (json!({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "pictures alone"),
            (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "`image_url.url`"),
            (json!({"messages": [shown("https://example.org/a.png", "a")]}), "picture 0 (from 0): not a `data:image/"),
            (json!({"messages": [shown("data:image/png;base64,YWJj", "a")]}), "not a PNG"),
            (json!({"messages": [user("a")], "tools": {}}), "`tools`"),
        ] {
            let problem = Dialogue::default().read(&request).unwrap_err();
            assert!(problem.contains(word), "{problem}");
        }
    }
}
