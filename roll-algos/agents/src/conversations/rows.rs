//! The forms in which data sets hold conversations, and their conversion to one form, a list of `messages`.

use roll_external::json;
use serde_json::{Map, Value, json};

/// The form that every other one is converted to, for error messages.
pub(super) const EXPECTED: &str =
    r#"{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}"#;

/// Returns `row` with the key `messages`, from the forms of TRL (`prompt` and `completion`), ShareGPT (`conversations`)
/// and Alpaca (`instruction`, `input` and `output`). Other rows are returned unchanged. Contents that are lists of
/// texts become one text, and OpenAI's older `functions` and `function_call` become `tools` and `tool_calls`.
pub(crate) fn normalised(row: Value) -> Result<Value, String> {
    let Value::Object(mut fields) = row else { return Ok(row) };
    fields.retain(|_, value| !value.is_null());
    let messages = match fields.remove("messages") {
        Some(messages) => messages,
        None if fields.contains_key("conversations") => share_gpt(&mut fields)?,
        None if fields.contains_key("prompt") && fields.contains_key("completion") => prompt_completion(&mut fields)?,
        None if fields.contains_key("instruction") && fields.contains_key("output") => alpaca(&mut fields)?,
        None => return Ok(Value::Object(fields)),
    };
    if let Some(functions) = fields.remove("functions") {
        if fields.contains_key("tools") {
            return Err("expected `tools` or `functions`, found both".into());
        }
        fields.insert("tools".into(), tools_of_functions(functions)?);
    }
    fields.insert("messages".into(), with_tool_calls(joined_texts(messages)?)?);
    Ok(Value::Object(fields))
}

/// `tools` from OpenAI's older `functions`, a list of descriptions or its JSON in a text.
fn tools_of_functions(functions: Value) -> Result<Value, String> {
    let functions = match functions {
        Value::String(text) => json::parse(&text).map_err(|e| format!("`functions`: expected a list: {e}"))?,
        functions => functions,
    };
    let Value::Array(functions) = functions else { return Err("`functions`: expected a list".into()) };
    Ok(functions.into_iter().map(|function| json!({ "type": "function", "function": function })).collect())
}

/// Replaces OpenAI's older `function_call` of a message, which is one call, by a list of `tool_calls`, and the role
/// `function` of the call's result by `tool`. The ids have nine letters and digits, as Mistral's templates demand.
fn with_tool_calls(mut messages: Value) -> Result<Value, String> {
    // Number of calls so far.
    let mut calls = 0;
    for (i, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        let Some(message) = message.as_object_mut() else { continue };
        let id = |number: usize| format!("call{number:05}");
        match message.shift_remove("function_call") {
            None | Some(Value::Null) => {}
            Some(_) if message.get("tool_calls").is_some_and(|calls| !calls.is_null() && *calls != json!([])) => {
                return Err(format!("message {}: expected `tool_calls` or `function_call`, found both", i + 1));
            }
            Some(call) if call["name"].is_string() => {
                let call = json!([{ "id": id(calls), "type": "function", "function": call }]);
                message.insert("tool_calls".into(), call);
                calls += 1;
            }
            Some(call) => {
                let expected = "expected {\"name\": \"...\", \"arguments\": \"{...}\"}";
                return Err(format!("message {}: `function_call`: {expected}, found {call}", i + 1));
            }
        }
        if calls > 0 && message.get("role").is_some_and(|role| role == "function") {
            message.insert("role".into(), "tool".into());
            message.insert("tool_call_id".into(), id(calls - 1).into());
        }
    }
    Ok(messages)
}

/// `messages` from ShareGPT's `conversations`, entries `{"from": ..., "value": ...}`, and `system`.
fn share_gpt(fields: &mut Map<String, Value>) -> Result<Value, String> {
    let turns = fields.remove("conversations").unwrap_or_default();
    let Value::Array(turns) = turns else { return Err("`conversations`: expected a list".into()) };
    let mut messages = Vec::new();
    if let Some(system) = fields.remove("system").filter(|system| system != "") {
        messages.push(json!({ "role": "system", "content": system }));
    }
    for (i, turn) in turns.into_iter().enumerate() {
        let Value::Object(mut turn) = turn else { return Err(format!("message {}: expected an object", i + 1)) };
        if let Some(from) = turn.remove("from") {
            let role = match from.as_str() {
                Some("human" | "user") => "user",
                Some("gpt" | "assistant" | "model" | "chatgpt") => "assistant",
                Some("system") => "system",
                _ => {
                    let known = "human, user, gpt, assistant, model, chatgpt, system";
                    return Err(format!("message {}: `from` is {from}; known: {known}", i + 1));
                }
            };
            turn.insert("role".into(), role.into());
        }
        if let Some(value) = turn.remove("value") {
            turn.insert("content".into(), value);
        }
        messages.push(Value::Object(turn));
    }
    Ok(Value::Array(messages))
}

/// `messages` from TRL's `prompt` and `completion`, each a text or a list of messages.
fn prompt_completion(fields: &mut Map<String, Value>) -> Result<Value, String> {
    let mut messages = Vec::new();
    for (key, role) in [("prompt", "user"), ("completion", "assistant")] {
        match fields.remove(key).unwrap_or_default() {
            Value::String(text) => messages.push(json!({ "role": role, "content": text })),
            Value::Array(list) => messages.extend(list),
            _ => return Err(format!("`{key}`: expected a text, or a list of messages")),
        }
    }
    Ok(Value::Array(messages))
}

/// `messages` from Alpaca's `instruction`, `input`, `output` and `system`. `input` follows the instruction after an
/// empty line.
fn alpaca(fields: &mut Map<String, Value>) -> Result<Value, String> {
    let mut text = |key: &str| match fields.remove(key) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(format!("`{key}`: expected a text")),
    };
    let (instruction, input, output) = (text("instruction")?, text("input")?, text("output")?);
    let question = if input.is_empty() { instruction } else { format!("{instruction}\n\n{input}") };
    let mut messages = Vec::new();
    let system = text("system")?;
    if !system.is_empty() {
        messages.push(json!({ "role": "system", "content": system }));
    }
    messages.push(json!({ "role": "user", "content": question }));
    messages.push(json!({ "role": "assistant", "content": output }));
    Ok(Value::Array(messages))
}

/// Joins contents that are lists of `{"type": "text", "text": ...}`. Fails on parts of another type, such as pictures.
fn joined_texts(mut messages: Value) -> Result<Value, String> {
    for (i, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        let Some(Value::Array(parts)) = message.get("content") else { continue };
        let mut content = String::new();
        for part in parts {
            match (part["type"].as_str(), part["text"].as_str()) {
                (Some("text") | None, Some(text)) => content.push_str(text),
                _ => {
                    let problem = "`content`: expected a text, or a list of {\"type\": \"text\", \"text\": \"...\"}";
                    return Err(format!("message {}: {problem}, found {part}", i + 1));
                }
            }
        }
        message["content"] = content.into();
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn forms_of_other_trainers_become_messages() {
        let expected = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]);
        for row in [
            json!({"messages": expected, "prompt": null}),
            json!({"prompt": "hi", "completion": "yo"}),
            json!({"prompt": [expected[0]], "completion": [expected[1]], "messages": null}),
            json!({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}),
            json!({"conversations": expected}),
            json!({"instruction": "hi", "input": "", "output": "yo"}),
            json!({"instruction": "hi", "output": "yo", "system": null}),
            json!({"messages": [
                {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, expected[1],
            ]}),
        ] {
            assert_eq!(normalised(row.clone()).unwrap()["messages"], expected, "{row}");
        }
        let with_input = normalised(json!({"instruction": "Add", "input": "1 2", "output": "3", "system": "S"}));
        let messages = with_input.unwrap()["messages"].clone();
        assert_eq!((&messages[0]["content"], &messages[1]["content"]), (&json!("S"), &json!("Add\n\n1 2")));
        for (row, words) in [
            (json!({"conversations": [{"from": "bing", "value": "x"}]}), "`from` is \"bing\""),
            (json!({"prompt": 1, "completion": "x"}), "`prompt`"),
            (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "message 1: `content`"),
            (json!({"messages": [], "functions": [], "tools": []}), "`tools` or `functions`"),
            (json!({"messages": [], "functions": {}}), "`functions`: expected a list"),
            (json!({"messages": [{"function_call": "f(1)"}]}), "message 1: `function_call`: expected {\"name\""),
            (json!({"messages": [{"function_call": {"name": "f"}, "tool_calls": [{}]}]}), "1: expected `tool_calls`"),
        ] {
            let problem = normalised(row).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
    }

    #[test]
    fn calls_of_functions_become_calls_of_tools() {
        let call = |name: &str| json!({"name": name, "arguments": "{\"a\": 1}"});
        let row = json!({
            "functions": [{"name": "f"}],
            "messages": [
                {"role": "user", "content": "hi", "function_call": null},
                {"role": "assistant", "content": null, "function_call": call("f")},
                {"role": "function", "name": "f", "content": "1"},
                {"role": "assistant", "content": null, "function_call": call("g"), "tool_calls": []},
                {"role": "function", "name": "g", "content": "2"},
            ],
        });
        let expected = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null,
             "tool_calls": [{"id": "call00000", "type": "function", "function": call("f")}]},
            {"role": "tool", "name": "f", "content": "1", "tool_call_id": "call00000"},
            {"role": "assistant", "content": null,
             "tool_calls": [{"id": "call00001", "type": "function", "function": call("g")}]},
            {"role": "tool", "name": "g", "content": "2", "tool_call_id": "call00001"},
        ]);
        let found = normalised(row.clone()).unwrap();
        assert_eq!(found["messages"], expected);
        assert_eq!(found["tools"], json!([{"type": "function", "function": {"name": "f"}}]));
        let mut texts = row;
        texts["functions"] = r#"[{"name": "f"}]"#.into();
        assert_eq!(normalised(texts).unwrap()["tools"], found["tools"]);
        // Without a call, the role is the row's.
        let alone = json!({"messages": [{"role": "function", "name": "f", "content": "1"}]});
        assert_eq!(normalised(alone.clone()).unwrap(), alone);
    }
}
