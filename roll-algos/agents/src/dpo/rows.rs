//! The forms in which data sets hold preferences, and their conversion to two conversations.

use serde_json::{Map, Value, json};

/// The form for error messages.
pub(super) const EXPECTED: &str = r#"{"prompt": "...", "chosen": "...", "rejected": "..."}"#;

/// Keys with the text of a prompt, in data sets of the hub.
const PROMPTS: [&str; 3] = ["prompt", "question", "instruction"];

/// The beginnings of turns in texts of whole dialogues, and the roles (Anthropic's HH-RLHF).
const TURNS: [(&str, &str); 2] = [("\n\nHuman:", "user"), ("\n\nAssistant:", "assistant")];

/// Converts a row to the rows of two conversations, `[chosen, rejected]`, each with the key `messages`. All keys that are
/// not understood stay in the first one.
///
/// Answers are texts or lists of messages. The prompt is a text or a list of messages, too; or it is missing, and both
/// answers begin with it. A text is the user's message as a prompt, the assistant's as an answer. Texts without a prompt
/// are dialogues with `Human:` and `Assistant:`, or have the prompt in common, up to the last white space.
pub(super) fn conversations(row: Value) -> Result<[Value; 2], String> {
    let Value::Object(mut fields) = row else { return Err(format!("expected an object such as {EXPECTED}")) };
    fields.retain(|_, value| !value.is_null());
    let mut take = |key: &str| fields.remove(key).ok_or_else(|| format!("expected `{key}`, such as in {EXPECTED}"));
    let answers = [("chosen", take("chosen")?), ("rejected", take("rejected")?)];
    let system = match fields.remove("system") {
        None => None,
        Some(Value::String(text)) => Some(text).filter(|text| !text.is_empty()),
        Some(_) => return Err("`system`: expected a text".into()),
    };
    let mut dialogues = match prompt(&mut fields)? {
        Some(prompt) => {
            let [chosen, rejected] = answers.map(|(key, answer)| with_prompt(&prompt, key, answer));
            [chosen?, rejected?]
        }
        None => without_prompt(answers)?,
    };
    if let Some(system) = system {
        for messages in dialogues.iter_mut().filter(|messages| messages.first().is_none_or(|m| m["role"] != "system")) {
            messages.insert(0, message("system", &system));
        }
    }
    let shared = ["tools", "functions"].map(|key| (key, fields.get(key).cloned()));
    let [chosen, rejected] = dialogues.map(Value::from);
    let mut of_rejected = Map::from_iter([("messages".to_string(), rejected)]);
    of_rejected.extend(shared.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?))));
    fields.insert("messages".into(), chosen);
    Ok([Value::Object(fields), Value::Object(of_rejected)])
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// Removes the prompt from the row and returns its messages. `None`: the row has no prompt.
fn prompt(fields: &mut Map<String, Value>) -> Result<Option<Vec<Value>>, String> {
    let Some(key) = PROMPTS.into_iter().find(|key| fields.contains_key(*key)) else { return Ok(None) };
    match fields.remove(key) {
        Some(Value::String(text)) => {
            // Alpaca's form has the object of an instruction beside it.
            let input = if key == "instruction" { fields.remove("input") } else { None };
            let text = match input {
                Some(Value::String(input)) if !input.is_empty() => format!("{text}\n\n{input}"),
                _ => text,
            };
            Ok(Some(match dialogue(&text) {
                Some(mut messages) => {
                    // The mark of the answer that is asked for.
                    messages.pop_if(|last| last["role"] == "assistant" && last["content"] == "");
                    messages
                }
                None => vec![message("user", &text)],
            }))
        }
        Some(Value::Array(messages)) => Ok(Some(messages)),
        _ => Err(format!("`{key}`: expected a text, or a list of messages")),
    }
}

/// The conversation of `prompt` and an answer. An answer in messages may repeat the prompt.
fn with_prompt(prompt: &[Value], key: &str, answer: Value) -> Result<Vec<Value>, String> {
    let answer = match answer {
        Value::String(text) => vec![message("assistant", &text)],
        Value::Array(messages) => messages,
        // A single message.
        Value::Object(fields) => vec![Value::Object(fields)],
        _ => return Err(format!("`{key}`: expected a text, or a list of messages")),
    };
    let same = |a: &Value, b: &Value| a["role"] == b["role"] && a["content"] == b["content"];
    // A system message may precede the prompt in the answer alone.
    let is_system = |message: &Value| message["role"] == "system";
    let system = answer.iter().zip(prompt).take_while(|(a, b)| is_system(a) && !is_system(b)).count();
    let rest = &answer[system..];
    let repeats = rest.len() > prompt.len() && prompt.iter().zip(rest).all(|(a, b)| same(a, b));
    Ok(if repeats { answer } else { [prompt, &answer].concat() })
}

/// The conversations of two answers that both begin with the prompt.
fn without_prompt(answers: [(&str, Value); 2]) -> Result<[Vec<Value>; 2], String> {
    let no_prompt =
        || format!("`chosen` and `rejected` begin differently, and there is no `prompt`: expected {EXPECTED}");
    match answers.map(|(_, answer)| answer) {
        [Value::Array(chosen), Value::Array(rejected)] => {
            let begins_alike = chosen.first().zip(rejected.first()).is_some_and(|(a, b)| a == b);
            if begins_alike { Ok([chosen, rejected]) } else { Err(no_prompt()) }
        }
        [Value::String(chosen), Value::String(rejected)] => {
            if let (Some(chosen), Some(rejected)) = (dialogue(&chosen), dialogue(&rejected)) {
                return Ok([chosen, rejected]);
            }
            let alike = chosen.chars().zip(rejected.chars()).take_while(|(a, b)| a == b);
            let common: usize = alike.map(|(c, _)| c.len_utf8()).sum();
            // One text may end where the other one goes on.
            let prompt = chosen[..common].rfind(char::is_whitespace).map(|at| chosen[..at].trim());
            let prompt = prompt.filter(|prompt| !prompt.is_empty()).ok_or_else(no_prompt)?;
            let end = chosen.find(prompt).unwrap_or(0) + prompt.len();
            Ok([&chosen, &rejected].map(|text| vec![message("user", prompt), message("assistant", text[end..].trim())]))
        }
        _ => Err("`chosen` and `rejected`: expected two texts, or two lists of messages".into()),
    }
}

/// The messages of a text with turns of [`TURNS`]. `None` for other texts.
fn dialogue(text: &str) -> Option<Vec<Value>> {
    let next = |text: &str| TURNS.iter().filter_map(|turn| Some((text.find(turn.0)?, turn))).min_by_key(|(at, _)| *at);
    let (mut messages, mut rest) = (Vec::new(), text);
    let (0, _) = next(rest)? else { return None };
    while let Some((at, (mark, role))) = next(rest) {
        let content = &rest[at + mark.len()..];
        let end = next(content).map_or(content.len(), |(end, _)| end);
        messages.push(message(role, content[..end].trim()));
        rest = &content[end..];
    }
    Some(messages)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn messages(row: Value) -> Result<[Value; 2], String> {
        Ok(conversations(row)?.map(|row| row["messages"].clone()))
    }

    fn talk(turns: &[(&str, &str)]) -> Value {
        turns.iter().map(|(role, content)| message(role, content)).collect()
    }

    #[test]
    fn explicit_and_implicit_prompts_in_texts_and_messages_are_the_same_pair() {
        let expected = ["sky", "sea"].map(|answer| talk(&[("user", "What is blue?"), ("assistant", answer)]));
        let user = message("user", "What is blue?");
        let answer = |text: &str| message("assistant", text);
        for row in [
            json!({"prompt": "What is blue?", "chosen": "sky", "rejected": "sea"}),
            json!({"question": "What is blue?", "chosen": "sky", "rejected": "sea", "prompt": null}),
            json!({"prompt": [user], "chosen": [answer("sky")], "rejected": [answer("sea")]}),
            json!({"prompt": "What is blue?", "chosen": answer("sky"), "rejected": answer("sea")}),
            json!({"chosen": [user, answer("sky")], "rejected": [user, answer("sea")]}),
            // The prompt is there twice.
            json!({"prompt": "What is blue?", "chosen": [user, answer("sky")], "rejected": [user, answer("sea")]}),
            json!({"chosen": "What is blue? sky", "rejected": "What is blue? sea"}),
            json!({"chosen": "\n\nHuman: What is blue?\n\nAssistant: sky",
                   "rejected": "\n\nHuman: What is blue?\n\nAssistant: sea"}),
            json!({"prompt": "\n\nHuman: What is blue?\n\nAssistant:", "chosen": "sky", "rejected": "sea"}),
        ] {
            assert_eq!(messages(row.clone()).unwrap(), expected, "{row}");
        }
        let with_input = json!({"instruction": "Name it", "input": "x", "chosen": "a", "rejected": "b", "score": 1});
        let [chosen, rejected] = conversations(with_input).unwrap();
        assert_eq!(chosen["messages"], talk(&[("user", "Name it\n\nx"), ("assistant", "a")]));
        assert!(chosen["score"] == 1 && rejected.get("score").is_none());
    }

    #[test]
    fn dialogues_of_several_turns_system_texts_and_tools_are_kept() {
        let text = |end: &str| format!("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: {end}");
        let pair = messages(json!({"chosen": text("d"), "rejected": text("")})).unwrap();
        assert_eq!(pair[0], talk(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]));
        assert_eq!(pair[1][3], message("assistant", ""));
        let row = json!({"system": "S", "prompt": "p", "chosen": "x", "rejected": "y", "tools": [1]});
        let [chosen, rejected] = conversations(row).unwrap();
        assert_eq!(rejected["messages"], talk(&[("system", "S"), ("user", "p"), ("assistant", "y")]));
        assert!(chosen["tools"] == json!([1]) && rejected["tools"] == json!([1]));
    }

    #[test]
    fn rows_that_are_no_preferences_say_what_is_missing() {
        let list = json!([message("user", "a"), message("assistant", "b")]);
        for (row, words) in [
            (json!({"prompt": "a", "chosen": "b"}), "expected `rejected`"),
            (json!({"prompt": "a", "chosen": "b", "rejected": null}), "expected `rejected`"),
            (json!({"prompt": 3, "chosen": "b", "rejected": "c"}), "`prompt`: expected a text"),
            (json!({"prompt": "a", "chosen": "b", "rejected": 3}), "`rejected`: expected a text"),
            (json!({"chosen": "b", "rejected": "c"}), "there is no `prompt`"),
            (json!({"chosen": list, "rejected": [message("user", "x")]}), "there is no `prompt`"),
            (json!({"chosen": list, "rejected": "x"}), "two texts, or two lists"),
            (json!({"prompt": "a", "system": 1, "chosen": "b", "rejected": "c"}), "`system`"),
            (json!([1]), "expected an object"),
        ] {
            let problem = messages(row.clone()).unwrap_err();
            assert!(problem.contains(words), "{row}: {problem}");
        }
    }
}
