//! Parses calls in the agent's answers, in the forms that chat templates teach: of Hermes and Qwen, Qwen3-Coder,
//! Mistral and Llama 3.

use roll_external::json::{parse as parse_json, with_integers};
use serde_json::{Value, json};

/// Begins and ends a call of Hermes' and Qwen's models.
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
/// Precedes calls of Mistral's models: a list of calls or, from version 11 of their tokenizer on, name and arguments of
/// one call.
const MISTRAL: &str = "[TOOL_CALLS]";
/// May precede calls of Llama's models. Without it, the whole answer must be calls.
const LLAMA: &str = "<|python_tag|>";
/// Ends the agent's thoughts, in which nothing is a call.
const THOUGHT: &str = "</think>";

/// A call that was made, and its result.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ToolCall {
    /// Name of the tool; empty if the call is invalid.
    pub tool: String,
    /// Arguments of the call; null if the call is invalid.
    pub arguments: Value,
    /// The result that the agent reads.
    pub output: Value,
    /// Whether the result is an error.
    pub failed: bool,
}

/// The tool calls of an answer, each an object `{"name", "arguments"}` or the reason why it is invalid. An answer
/// without calls is for the environment.
pub fn parse_calls(answer: &str) -> Vec<Result<Value, String>> {
    let rest = answer.rfind(THOUGHT).map_or(answer, |at| &answer[at + THOUGHT.len()..]);
    if rest.contains(OPEN) {
        return tagged(rest);
    }
    match rest.split_once(MISTRAL) {
        Some((_, calls)) => mistral(calls),
        None => llama(rest.trim()),
    }
}

/// Calls between [`OPEN`] and [`CLOSE`]: JSON of Hermes' and Qwen's models, or the form of Qwen3-Coder.
fn tagged(mut rest: &str) -> Vec<Result<Value, String>> {
    let mut calls = Vec::new();
    while let Some(at) = rest.find(OPEN) {
        let inner = &rest[at + OPEN.len()..];
        let Some((call, after)) = inner.split_once(CLOSE) else {
            calls.push(Err(format!("the call has no {CLOSE}")));
            break;
        };
        let call = call.trim();
        calls.push(if call.starts_with("<function=") { qwen_coder(call) } else { parse(call) });
        rest = after;
    }
    calls
}

/// `[{"name", "arguments"}, ...]`, or `name[ARGS]{...}` for each [`MISTRAL`].
fn mistral(text: &str) -> Vec<Result<Value, String>> {
    let text = text.trim();
    if text.starts_with('[') {
        let list = serde_json::Deserializer::from_str(&with_integers(text)).into_iter::<Vec<Value>>().next();
        return match list {
            Some(Ok(calls)) => calls.iter().map(normalised).collect(),
            _ => vec![Err(format!("expected a list of {EXPECTED} behind {MISTRAL}"))],
        };
    }
    let name_and_arguments = |text: &str| {
        let name_end =
            text.find(['[', '{']).ok_or_else(|| format!("expected a name and arguments behind {MISTRAL}"))?;
        let (name, arguments) = (text[..name_end].trim(), &text[text.find('{').unwrap_or(text.len())..]);
        let arguments = serde_json::Deserializer::from_str(&with_integers(arguments)).into_iter::<Value>().next();
        let arguments =
            arguments.and_then(Result::ok).ok_or_else(|| format!("the arguments of `{name}` are not JSON"))?;
        normalised(&json!({ "name": name, "arguments": arguments }))
    };
    text.split(MISTRAL).map(name_and_arguments).collect()
}

/// Objects `{"name", "parameters"}`, separated by semicolons. Without [`LLAMA`] before them, nothing else may follow:
/// the text is then no call, but an answer.
fn llama(text: &str) -> Vec<Result<Value, String>> {
    let (text, is_marked) = text.strip_prefix(LLAMA).map_or((text, false), |text| (text.trim(), true));
    let text = if text.starts_with('{') { with_integers(text) } else { text.into() };
    let mut calls = Vec::new();
    let mut rest = &*text;
    while rest.starts_with('{') {
        let mut objects = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let Some(Ok(object)) = objects.next() else { break };
        let has_arguments =
            ["parameters", "arguments"].iter().any(|key| object.get(key).is_some_and(|v| v.is_object() || v.is_null()));
        if !(object["name"].is_string() && has_arguments) {
            break;
        }
        calls.push(normalised(&object));
        rest = rest[objects.byte_offset()..].trim_start_matches(|c: char| c == ';' || c.is_whitespace());
    }
    if rest.is_empty() {
        calls
    } else if is_marked {
        vec![Err(format!("expected {EXPECTED} behind {LLAMA}"))]
    } else {
        Vec::new()
    }
}

/// A call `<function=name> <parameter=key> value </parameter> ... </function>`. A value that is not JSON is a text.
fn qwen_coder(text: &str) -> Result<Value, String> {
    let expected = || "expected <function=NAME>, <parameter=KEY>VALUE</parameter> and </function>".to_string();
    let (name, mut rest) =
        text.strip_prefix("<function=").and_then(|text| text.split_once('>')).ok_or_else(expected)?;
    let mut arguments = serde_json::Map::new();
    while let Some((_, parameter)) = rest.split_once("<parameter=") {
        let (key, value) = parameter.split_once('>').ok_or_else(expected)?;
        let (value, after) = value.split_once("</parameter>").ok_or_else(expected)?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.trim().into(), parse_json(value).unwrap_or_else(|_| value.into()));
        rest = after;
    }
    normalised(&json!({ "name": name.trim(), "arguments": arguments }))
}

/// The form of a call, for error messages.
const EXPECTED: &str = r#"{"name": "...", "arguments": {...}}"#;

/// A call from its JSON.
fn parse(text: &str) -> Result<Value, String> {
    normalised(&parse_json(text).map_err(|e| format!("expected {EXPECTED}: {e}"))?)
}

/// The call with the keys `name` and `arguments` only. Fails if it has no name, or arguments that are not an object.
fn normalised(call: &Value) -> Result<Value, String> {
    let expected = format!("expected {EXPECTED}");
    let name = call.get("name").and_then(Value::as_str).ok_or_else(|| format!("{expected}: there is no `name`"))?;
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => Value::Object(serde_json::Map::new()),
        Some(Value::Object(arguments)) => Value::Object(arguments.clone()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(serde_json::Map::new()),
        // Some models write the object as a string.
        Some(Value::String(text)) => match parse_json(text) {
            Ok(Value::Object(arguments)) => Value::Object(arguments),
            _ => return Err(format!("{expected}: `arguments` is not an object")),
        },
        Some(_) => return Err(format!("{expected}: `arguments` is not an object")),
    };
    Ok(json!({ "name": name, "arguments": arguments }))
}
