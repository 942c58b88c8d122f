#![allow(clippy::unwrap_used)]
use roll_core::{LanguageModel, Message};
use roll_testing::{Bigram, Scripted, Texts};
use serde_json::{Map, Value, json};

use super::*;
use crate::conversations::Conversations;

fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.jsonl");
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

#[test]
fn only_what_the_assistant_says_is_trained_on() {
    let (_dir, path) = file(
        "{\"messages\": [{\"role\": \"user\", \"content\": \"ab\"}, {\"role\": \"assistant\", \"content\": \"c\"}, \
         {\"role\": \"user\", \"content\": \"d\"}, {\"role\": \"assistant\", \"content\": \"ef\"}]}\n\n",
    );
    let data = Conversations::read(&path).unwrap();
    let model = Bigram::new();
    assert_eq!(texts(&data, &model), [["u:ab$a:c$u:d$a:ef$".to_string(), "c$ef$".to_string()]]);
    assert!(data.samples(0, TrainOn::All, &model).unwrap()[0].train.iter().all(|t| *t));
}

#[test]
fn invalid_conversations_are_named_by_their_line() {
    for (text, word) in [
        ("{\"messages\": []}\n", "line 1"),
        ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\nno\n", "line 2"),
        ("\n", "found none"),
        ("{\"messages\": [{\"role\": \"robot\", \"content\": \"a\"}]}\n", "line 1: message 1: the role `robot`"),
        ("{\"message\": 3}\n", "messages"),
    ] {
        let (_dir, path) = file(text);
        let reason = Conversations::read(&path).map(drop).unwrap_err().to_string();
        assert!(reason.contains(word), "{reason}");
    }
}

/// The samples of the first row as text, with the text that is trained on.
fn texts(data: &Conversations, model: &Bigram) -> Vec<[String; 2]> {
    let samples = data.samples(0, TrainOn::Responses, model).unwrap();
    let texts = samples.iter().map(|tokens| {
        let whole = model.detokenize(&tokens.ids).unwrap();
        let trained = whole.chars().zip(&tokens.train).filter(|(_, train)| **train).map(|(c, _)| c).collect();
        [whole, trained]
    });
    texts.collect()
}

/// The conversations of a file with `row`, or the error of reading and checking them.
fn checked(row: &str, model: &Bigram) -> Result<Conversations, String> {
    let (_dir, path) = file(row);
    let mut data = Conversations::read(&path).map_err(|e| e.chain())?;
    data.check("algo.data", TrainOn::Responses, usize::MAX, model).map_err(|e| e.chain())?;
    Ok(data)
}

#[test]
fn a_template_that_rewrites_history_makes_one_sample_per_answer() {
    let row = r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "y"}, {"role": "assistant", "content": "c"}]}"#
        .replace('\n', "");
    let mut model = Bigram::new();
    model.forgets = true;
    let data = checked(&row, &model).unwrap();
    assert_eq!(texts(&data, &model), [["u:x$a:ab$", "ab$"], ["u:x$a:$u:y$a:c$", "c$"]].map(|s| s.map(String::from)));
    let all = data.samples(0, TrainOn::All, &model).unwrap();
    assert_eq!(model.detokenize(&all[0].ids).unwrap(), "u:x$a:$u:y$a:c$");
}

#[test]
fn fields_of_messages_are_rendered_or_refused() {
    let row = |message: &str| format!(r#"{{"messages": [{{"role": "user", "content": "x"}}, {message}]}}"#);
    let answer = |fields: &str| row(&format!(r#"{{"role": "assistant", "content": "b", {fields}}}"#));
    let model = Bigram::new();
    let data = checked(&answer(r#""reasoning_content": "think", "tool_calls": null, "name": """#), &model).unwrap();
    assert_eq!(texts(&data, &model), [["u:x$a:thinkb$".to_string(), "thinkb$".to_string()]]);
    let call = r#""tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]"#;
    let tools = answer(r#""name": null"#).replace("{\"messages\"", r#"{"tools": [{"type": "function"}], "messages""#);
    for (row, words) in [
        (answer(call), ["line 1: message 2", "does not write `tool_calls`"]),
        (row(&format!(r#"{{"role": "assistant", "content": null, {call}}}"#)), ["message 2", "`tool_calls`"]),
        (answer(r#""name": "Ann""#), ["data.jsonl", "does not write `name`"]),
        (tools, ["line 1", "does not write `tools`"]),
        (answer(r#""weight": 0.5"#), ["line 1: message 2", "expected 0 or 1"]),
        (answer(r#""weight": 0"#), ["data.jsonl", "has a token to train on"]),
        (row(r#"{"role": "assistant", "content": null}"#), ["message 2", "expected `content`"]),
        (answer(r#""tool_calls": [{"function": {"arguments": "f(x)"}}]"#), ["line 1: message 2", "a JSON object"]),
        (
            answer(r#""tool_calls": [{"name": "f", "arguments": [1]}]"#),
            ["line 1: message 2", "a JSON object, found [1]"],
        ),
        (answer(r#""tool_calls": [{"name": "f", "arguments": 3}]"#), ["line 1: message 2", "a JSON object, found 3"]),
        (answer(r#""tool_calls": ["f(x)"]"#), ["line 1: message 2", "found [\"f(x)\"]"]),
        (answer(r#""tool_calls": {"name": "f"}"#), ["line 1: message 2", "expected a list"]),
        (answer(r#""function_call": {"name": "f", "arguments": "{}"}"#), ["message 2", "does not write `tool_calls`"]),
    ] {
        let reason = checked(&row, &model).map(drop).unwrap_err();
        assert!(words.iter().all(|word| reason.contains(word)), "{row}: {reason}");
    }
}

/// Writes calls and the descriptions of tools as JSON.
struct Calls;

impl Texts for Calls {
    fn render_chat_with_tools(&self, messages: &[Message], tools: &[Value], ask: bool) -> Result<Option<String>> {
        let mut text: String = tools.iter().map(|tool| format!("t:{tool}$")).collect();
        for m in messages {
            let calls = m.fields.get("tool_calls").map(ToString::to_string).unwrap_or_default();
            text += &format!("{}:{calls}{}$", &m.role[..1], m.content);
        }
        Ok(Some(if ask { text + "a:" } else { text }))
    }

    fn render_chat(&self, messages: &[Message], ask: bool) -> Result<String> {
        Ok(self.render_chat_with_tools(messages, &[], ask)?.unwrap_or_default())
    }
}

#[test]
fn calls_without_arguments_and_with_those_of_a_table_are_written_as_they_were_meant() {
    let tools = json!([{"type": "function", "function": {"name": "f", "description": null, "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "enum": null}, "b": {"type": ["string", "null"]}, "c": {"type": "string"},
            "d": null, "e": {}, "g": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "h": {"oneOf": [{"type": "string"}]},
            "i": {"enum": [1, null]}, "j": {"type": "string", "nullable": true, "default": null},
        },
        "required": ["c"],
    }}}]);
    let nulls: Map<String, Value> = "abcdeghijz".chars().map(|key| (key.to_string(), Value::Null)).collect();
    let written = |arguments: Value, tools: &Value| {
        let call = match arguments {
            Value::Bool(_) => json!([{"function": {"name": "f"}}]),
            arguments => json!([{"function": {"name": "f", "arguments": arguments}}]),
        };
        let row = json!({"tools": tools, "messages": [
            {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": call},
        ]});
        let (_dir, path) = file(&row.to_string());
        let mut data = Conversations::read(&path).unwrap();
        let model = Scripted::new(Calls, &[]);
        data.check("algo.data", TrainOn::Responses, usize::MAX, &model).unwrap();
        model.detokenize(&data.samples(0, TrainOn::Responses, &model).unwrap()[0].ids).unwrap()
    };
    let arguments = |text: &str| {
        let at = text.find("\"arguments\":").unwrap() + 12;
        serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>().next().unwrap().unwrap()
    };
    for none in [Value::Null, json!(""), json!({}), json!(true)] {
        assert_eq!(arguments(&written(none, &Value::Null)), json!({}));
    }
    // A text holds what its author wrote, and without a description nobody knows.
    assert_eq!(arguments(&written(json!(r#"{"z": null}"#), &tools)), json!({"z": null}));
    assert_eq!(arguments(&written(json!({"z": null}), &Value::Null)), json!({"z": null}));
    let text = written(Value::Object(nulls), &tools);
    assert_eq!(arguments(&text), json!({"b": null, "c": null, "e": null, "g": null, "i": null, "j": null}),);
    let expected = r#""name":"f","parameters":{"type":"object","properties":{"a":{"type":"integer"},"b""#;
    assert!(text.contains(expected) && !text.contains("\"d\":null"), "{text}");
    assert!(text.contains(r#""default":null"#) && text.contains("[1,null]"), "{text}");
}

#[test]
fn text_after_the_end_of_a_turn_is_not_trained_on() {
    let mut model = Bigram::new();
    model.after_end = "\n";
    let row = r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "b"}]}"#;
    assert_eq!(texts(&checked(row, &model).unwrap(), &model), [["u:x$\na:b$\n".to_string(), "b$".to_string()]]);
}

#[test]
fn no_blank_is_trained_where_a_tokenizer_begins_texts_with_one() {
    let mut model = Bigram::new();
    model.adds_blank = true;
    let row = r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "y"}, {"role": "assistant", "content": "c"}]}"#;
    let data = checked(&row.replace('\n', ""), &model).unwrap();
    assert_eq!(texts(&data, &model), [[" u:x$ a:b$ u:y$ a:c$".to_string(), "b$c$".to_string()]]);
    // The template ends an answer with a line break, which the next turn follows without a blank.
    model.after_end = "\n";
    let whole = " u:x$ \na:b$ \nu:y$ \na:c$ \n";
    assert_eq!(texts(&data, &model), [[whole.to_string(), "b$c$".to_string()]]);
}

#[test]
fn a_json_list_is_read_like_lines() {
    let entry = r#"{"messages": [{"role": "assistant", "content": "b"}]}"#;
    assert_eq!(checked(&format!("[{entry},\n {entry}]\n"), &Bigram::new()).unwrap().len(), 2);
    let reason = checked(&format!("[{entry}, {{\"messages\": []}}]"), &Bigram::new()).map(drop).unwrap_err();
    assert!(reason.contains("entry 2: expected at least one message"), "{reason}");
}

#[test]
fn every_row_is_looked_at_before_the_first_step() {
    let entry = |fields: &str| format!("{{\"messages\": [{{\"role\": \"assistant\", \"content\": \"b\"{fields}}}]}}\n");
    let (_dir, path) = file(&(entry("") + &entry(", \"tool_calls\": [{\"name\": \"f\"}]")));
    let mut sft = Sft::new(SftConfig::default(), Conversations::read(&path).unwrap()).unwrap();
    let reason = sft.check(&mut Bigram::new(), None).unwrap_err().to_string();
    assert!(reason.contains("line 2: message 1") && reason.contains("tool_calls"), "{reason}");
}

#[test]
fn rejects_invalid_training_options() {
    let zero = SftConfig { batch_size: 0, ..SftConfig::default() };
    assert!(Sft::new(zero, Conversations::default()).err().unwrap().to_string().contains("batch_size"));
    let context = BuildContext::new("flex");
    let reason = Sft::open(SftConfig::default(), &context).err().unwrap().to_string();
    assert!(reason.contains("algo.data"), "{reason}");
}

#[test]
fn the_model_answers_held_out_conversations_for_the_report() {
    let row = |prompt: &str, answer: &str| {
        let messages = [Message::new("user", prompt), Message::new("assistant", answer)];
        serde_json::json!({"messages": messages}).to_string() + "\n"
    };
    let long = "x".repeat(2000);
    let (_dir, path) = file(&(row("p", "q") + &row(&long, "r") + &row("s", "t") + &row("u", "v")));
    let data = Conversations::read(&path).unwrap();
    let mut model = Bigram::of("a");
    let records = |train_on, model: &mut Bigram| {
        let config = SftConfig { train_on, ..SftConfig::default() };
        let mut sft = Sft::new(config, data.clone()).unwrap();
        sft.held_out = Some(data.clone());
        sft.validate(4, model, &Noise::new(0), &roll_core::Silent).unwrap().unwrap().records
    };
    let found = records(TrainOn::Responses, &mut model);
    assert_eq!(found.len(), 3);
    let text = |i: usize, key: &str| found[i][key].as_str().unwrap().to_string();
    assert_eq!((text(0, "prompt"), text(0, "wanted")), ("u:p$a:".into(), "q$".into()));
    assert_eq!((found[0]["step"].as_u64(), found[0]["kind"].as_str()), (Some(4), Some("validation")));
    assert!(text(1, "prompt").len() == 1500 && text(1, "prompt").ends_with("x$a:"));
    assert!(text(2, "row").ends_with("line 3") && (1..=256).contains(&text(0, "answer").len()));
    assert!(records(TrainOn::All, &mut model).is_empty());
}
