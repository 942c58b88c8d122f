//! Calls in the agent's answers.

use serde_json::Value;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
/// Thoughts before this are no calls.
const THOUGHT: &str = "</think>";

/// A call that was made, and its result.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ToolCall {
    /// Name of the tool; empty where the call could not be read.
    pub tool: String,
    /// Its arguments.
    pub arguments: Value,
    /// The tool's answer to the agent.
    pub output: Value,
    /// Whether that is an error.
    pub failed: bool,
}

/// The tool calls of an answer, each `{"name", "arguments"}` or the reason why it is invalid. Empty: the answer is for
/// the environment.
pub fn parse_calls(answer: &str) -> Vec<Result<Value, String>> {
    let mut rest = answer.rfind(THOUGHT).map_or(answer, |at| &answer[at + THOUGHT.len()..]);
    let mut calls = Vec::new();
    while let Some(at) = rest.find(OPEN) {
        let inner = &rest[at + OPEN.len()..];
        let Some((call, after)) = inner.split_once(CLOSE) else {
            calls.push(Err(format!("the call has no {CLOSE}")));
            break;
        };
        calls.push(read(call.trim()));
        rest = after;
    }
    calls
}

fn read(text: &str) -> Result<Value, String> {
    let expected = r#"expected {"name": "...", "arguments": {...}}"#;
    let call: Value = serde_json::from_str(text).map_err(|e| format!("{expected}: {e}"))?;
    let name = call.get("name").and_then(Value::as_str).ok_or_else(|| format!("{expected}: there is no `name`"))?;
    let arguments = match call.get("arguments") {
        None | Some(Value::Null) => Value::Object(serde_json::Map::new()),
        Some(Value::Object(arguments)) => Value::Object(arguments.clone()),
        // Some models write the object as a string.
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Object(arguments)) => Value::Object(arguments),
            _ => return Err(format!("{expected}: `arguments` is not an object")),
        },
        Some(_) => return Err(format!("{expected}: `arguments` is not an object")),
    };
    Ok(serde_json::json!({ "name": name, "arguments": arguments }))
}
