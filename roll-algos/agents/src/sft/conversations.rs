//! Conversations on disk, and as tokens of which some are trained on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use roll_core::{Error, LanguageModel, Message, Result};
use roll_external::{files, json};
use serde_json::{Map, Value, json};

use super::{SftConfig, TrainOn, rows};
use crate::pieces::tokenize_after;

/// Larger files are refused: they are held in memory.
const MAX_BYTES: u64 = 4 << 30;

/// Roles of messages in chat templates. Data sets of another form have others (`human`, `gpt`), and nothing of them
/// would be trained on.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// Fields of a tool's result that name the call which it answers. Many chat templates rely on the order alone.
const LINKS: [&str; 2] = ["tool_call_id", "name"];

/// Field with calls of tools.
const CALLS: &str = "tool_calls";

/// Field that holds null where a message has no text.
const CONTENT: &str = "content";

/// One conversation of a file.
#[derive(serde::Deserialize)]
struct Entry {
    messages: Vec<Map<String, Value>>,
    /// A list, or its JSON in a text.
    tools: Option<Value>,
    /// Keys without an effect.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A conversation.
#[derive(Clone, Debug)]
struct Conversation {
    /// Its place in the file: `line 3`, or `entry 3` of a JSON list.
    place: String,
    messages: Vec<Message>,
    /// Answers of weight 0, which are not trained on.
    untrained: Vec<usize>,
    /// Descriptions of tools.
    tools: Vec<Value>,
    /// A null argument of a call whose tool is not described.
    undecided: Option<String>,
    /// Whether the chat template writes every field in this form.
    is_checked: bool,
}

/// The conversations of a file, in memory.
#[derive(Clone, Debug, Default)]
pub struct Conversations {
    file: PathBuf,
    rows: Vec<Conversation>,
}

/// A sample: a conversation, or a part of it, as tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokens {
    /// Ids.
    pub ids: Vec<u32>,
    /// Which of them are trained on.
    pub train: Vec<bool>,
}

/// A sample as text: pieces that meet where the assistant begins or ends to act, and whether each is trained on.
type Pieces = Vec<(String, bool)>;

impl Tokens {
    /// Number of tokens that are predicted and trained on; the first is not predicted.
    pub fn trained(&self) -> usize {
        self.train.iter().skip(1).filter(|train| **train).count()
    }

    /// The tokens before the last answer that is trained on, and those of the answer; `None` without either.
    pub(super) fn last_answer(self) -> Option<[Vec<u32>; 2]> {
        let end = self.train.iter().rposition(|train| *train)? + 1;
        let begin = self.train[..end].iter().rposition(|train| !*train)? + 1;
        Some([self.ids[..begin].to_vec(), self.ids[begin..end].to_vec()])
    }

    /// Whether something is trained on, and no more than `limit` tokens are needed for it.
    pub(super) fn is_usable(&self, limit: usize) -> bool {
        self.ids.len() <= limit && self.trained() > 0
    }
}

impl Conversations {
    /// The number of conversations that `other` has, too.
    pub(super) fn count_in(&self, other: &Self) -> usize {
        let text = |row: &Conversation| serde_json::json!([row.messages, row.tools]).to_string();
        let others: BTreeSet<String> = other.rows.iter().map(text).collect();
        self.rows.iter().filter(|row| others.contains(&text(row))).count()
    }

    /// Reads JSON lines (empty ones are skipped) or a JSON list. Fails on an entry that is not a conversation, and on a
    /// file without any.
    pub fn read(file: &Path) -> Result<Self> {
        let text = files::read_text(file, MAX_BYTES).map_err(Error::file("read", file))?;
        let entries: Box<dyn Iterator<Item = (String, serde_json::Result<Value>)>> =
            match text.trim_start().starts_with('[') {
                true => {
                    let list: Vec<Value> = json::parse(&text)
                        .map_err(|e| Error::bad_file(file, format!("expected a JSON list of conversations: {e}")))?;
                    Box::new(list.into_iter().enumerate().map(|(i, entry)| (format!("entry {}", i + 1), Ok(entry))))
                }
                false => {
                    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
                    Box::new(lines.map(|(i, line)| (format!("line {}", i + 1), json::parse(line))))
                }
            };
        let (mut read, mut others) = (Vec::new(), BTreeSet::new());
        for (place, entry) in entries {
            let expected = |e: serde_json::Error| format!("expected an object such as {}: {e}", rows::EXPECTED);
            let row = entry
                .map_err(expected)
                .and_then(rows::normalised)
                .and_then(|entry| serde_json::from_value::<Entry>(entry).map_err(expected))
                .and_then(|mut entry| {
                    others.extend(std::mem::take(&mut entry.others).into_iter().map(|(key, _)| key));
                    Conversation::new(place.clone(), entry)
                });
            read.push(row.map_err(|problem| Error::bad_file(file, format!("{place}: {problem}")))?);
        }
        if !others.is_empty() {
            let keys = others.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            tracing::warn!("{}: keys beside `messages` and `tools` have no effect: {keys}", file.display());
        }
        if let Some((row, argument)) = read.iter().find_map(|row| Some((row, row.undecided.as_ref()?))) {
            tracing::warn!(
                "{}: {}: the argument {argument} is null and written as such: describe the tool in `tools` if a table \
                 (Parquet) added it, so that it is left out",
                file.display(),
                row.place
            );
        }
        match read.is_empty() {
            true => Err(Error::bad_file(file, "expected conversations, one a line or a JSON list; found none")),
            false => Ok(Self { file: file.into(), rows: read }),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The place of a row, for messages.
    pub fn origin(&self, row: usize) -> String {
        format!("{}: {}", self.file.display(), self.rows[row].place)
    }

    /// Renders every row, so that an invalid one is found before the first step, and keeps the form that the chat
    /// template reads. Fails also if none can be trained on; `key` names the file.
    pub(super) fn check(&mut self, key: &str, config: &SftConfig, model: &dyn LanguageModel) -> Result<()> {
        let (limit, mut split, mut is_usable) = (config.limit(model), 0, false);
        for row in 0..self.rows.len() {
            let (form, pieces) = self.form(row, config.train_on, model)?;
            self.rows[row] = form;
            split += usize::from(pieces.len() > 1);
            // Rendering is much faster than counting tokens, which one row suffices for.
            for sample in pieces {
                is_usable = is_usable || tokens(sample, config.train_on, model)?.is_usable(limit);
            }
        }
        if split > 0 {
            tracing::info!(
                "{}: the chat template rewrites earlier answers once more messages follow: {split} of {} \
                 conversations are trained as one sample per answer",
                self.file.display(),
                self.rows.len()
            );
        }
        if !is_usable {
            let problem = format!(
                "no conversation of {} has a token to train on within {limit} tokens (`algo.sequence_length`)",
                self.file.display()
            );
            return Err(Error::config(key, problem));
        }
        Ok(())
    }

    /// The samples of a row: the whole conversation, or one sample per answer if the chat template rewrites earlier
    /// answers.
    pub fn samples(&self, row: usize, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Vec<Tokens>> {
        let pieces = self.form(row, train_on, model)?.1;
        pieces.into_iter().map(|sample| tokens(sample, train_on, model)).collect()
    }

    /// The first form of a row that the chat template writes, and its samples as text.
    fn form(&self, row: usize, train_on: TrainOn, model: &dyn LanguageModel) -> Result<(Conversation, Vec<Pieces>)> {
        let conversation = &self.rows[row];
        let pieces = |form: Conversation| {
            form.check_fields(train_on, model)?;
            form.pieces(train_on, model).map(|pieces| (Conversation { is_checked: true, ..form }, pieces))
        };
        let found = match conversation.is_checked {
            true => conversation.pieces(train_on, model).map(|pieces| (conversation.clone(), pieces)),
            false => {
                let mut forms = conversation.forms(model);
                let first = forms.next().unwrap_or_else(|| conversation.clone());
                pieces(first).or_else(|e| forms.find_map(|form| pieces(form).ok()).ok_or(e))
            }
        };
        found.map_err(|error| match error {
            Error::Unsupported(problem) => Error::bad_file(&self.file, format!("{}: {problem}", conversation.place)),
            error => Error::Context { doing: self.origin(row), source: Box::new(error) },
        })
    }
}

/// A sample as tokens.
fn tokens(pieces: Pieces, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Tokens> {
    let ends = model.end_tokens();
    let mut tokens = Tokens { ids: Vec::new(), train: Vec::new() };
    let mut before = String::new();
    for (text, train) in pieces {
        let ids = tokenize_after(model, &before, &text)?;
        // The model never writes what follows the end of its turn.
        let end = ids.iter().rposition(|id| train_on == TrainOn::Responses && ends.contains(id));
        let trained = if train { end.map_or(ids.len(), |end| end + 1) } else { 0 };
        tokens.train.extend((0..ids.len()).map(|i| i < trained));
        tokens.ids.extend(ids);
        if !text.is_empty() {
            before = text;
        }
    }
    Ok(tokens)
}

impl Conversation {
    fn new(place: String, entry: Entry) -> Result<Self, String> {
        if entry.messages.is_empty() {
            return Err("expected at least one message, found none".into());
        }
        let tools = tools(entry.tools)?;
        let (mut messages, mut untrained, mut undecided) = (Vec::new(), Vec::new(), None);
        for (i, fields) in entry.messages.into_iter().enumerate() {
            let (mut message, train) = message(fields).map_err(|problem| format!("message {}: {problem}", i + 1))?;
            undecided = undecided.or(message.fields.get_mut(CALLS).and_then(|calls| remove_absent(calls, &tools)));
            messages.push(message);
            if !train {
                untrained.push(i);
            }
        }
        Ok(Self { place, messages, untrained, tools, undecided, is_checked: false })
    }

    /// The forms of calls that a template may read, in the order in which they are tried: arguments as an object, then
    /// as in the row; no text as null, then as an empty text. Templates that write null as a word get the empty text
    /// alone.
    fn forms<'a>(&'a self, model: &'a dyn LanguageModel) -> impl Iterator<Item = Self> + 'a {
        let has_calls = self.messages.iter().any(|message| message.fields.contains_key(CALLS));
        let objects: fn(&mut Value) = parse_arguments;
        let texts: fn(&mut Value) = write_arguments;
        let unchanged: fn(&mut Value) = |_| ();
        let forms = if has_calls { vec![objects, texts] } else { vec![unchanged] };
        forms.into_iter().flat_map(move |rewrite| {
            let mut form = self.clone();
            form.messages.iter_mut().filter_map(|message| message.fields.get_mut(CALLS)).for_each(rewrite);
            let mut empty = form.clone();
            empty.messages.iter_mut().for_each(|message| drop(message.fields.shift_remove(CONTENT)));
            let words =
                |form: &Self| form.render(&form.messages, false, model).map(|text| text.matches("None").count());
            let keeps_null = empty.messages != form.messages
                && !matches!((words(&form), words(&empty)), (Ok(null), Ok(empty)) if null > empty);
            keeps_null.then_some(form).into_iter().chain([empty])
        })
    }

    fn render(&self, messages: &[Message], continue_as_assistant: bool, model: &dyn LanguageModel) -> Result<String> {
        if self.tools.is_empty() {
            return model.render_chat(messages, continue_as_assistant);
        }
        let rendered = model.render_chat_with_tools(messages, &self.tools, continue_as_assistant)?;
        rendered.ok_or_else(|| Error::Unsupported("the model's chat template does not write `tools`".into()))
    }

    /// Fails on a field without an effect on the text: the model would be trained on something else.
    fn check_fields(&self, train_on: TrainOn, model: &dyn LanguageModel) -> Result<()> {
        if train_on == TrainOn::All
            && let Some(i) = self.untrained.first()
        {
            let problem = format!("message {}: `weight: 0` has no effect with `algo.train_on: all`", i + 1);
            return Err(Error::Unsupported(problem));
        }
        for (i, message) in self.messages.iter().enumerate() {
            let is_result = ["tool", "function", "ipython"].contains(&message.role.as_str());
            for key in message
                .fields
                .keys()
                .filter(|key| key.as_str() != CONTENT && !(is_result && LINKS.contains(&key.as_str())))
            {
                let mut without = self.messages[..=i].to_vec();
                without[i].fields.remove(key);
                let with = self.render(&self.messages[..=i], false, model)?;
                if self.render(&without, false, model).is_ok_and(|without| without == with) {
                    let problem = format!("message {}: the model's chat template does not write `{key}`", i + 1);
                    return Err(Error::Unsupported(problem));
                }
            }
        }
        Ok(())
    }

    /// The samples as text. Without rewriting, the whole text is cut before and after each answer.
    fn pieces(&self, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Vec<Pieces>> {
        let all = train_on == TrainOn::All;
        let whole = self.render(&self.messages, false, model)?;
        let (mut samples, mut pieces) = (Vec::new(), Pieces::new());
        let mut done = Some(0);
        for (i, message) in self.messages.iter().enumerate().filter(|(_, message)| message.role == "assistant") {
            let before = self.render(&self.messages[..i], true, model)?;
            let after = self.render(&self.messages[..=i], false, model)?;
            match after.strip_prefix(before.as_str()).filter(|answer| contains(answer, &message.content)) {
                Some(answer) => {
                    let train = all || !self.untrained.contains(&i);
                    samples.push(vec![(before.clone(), false), (answer.to_string(), train)]);
                    done = done.filter(|done| whole.starts_with(&after) && *done <= before.len()).map(|done| {
                        pieces.push((before[done..].to_string(), all));
                        pieces.push((answer.to_string(), train));
                        after.len()
                    });
                }
                None if all => done = None,
                None => {
                    let problem = format!(
                        "message {}: the chat template does not write this answer, whole, after the text that asks \
                         for it: put a chat_template.jinja that does beside the model",
                        i + 1
                    );
                    return Err(Error::Unsupported(problem));
                }
            }
        }
        match done {
            Some(done) => pieces.push((whole[done..].to_string(), all)),
            None if all => pieces = vec![(whole, true)],
            None => {
                samples.retain(|pieces| pieces[1].1);
                return Ok(samples);
            }
        }
        Ok(vec![pieces])
    }
}

/// Whether `text` contains `part`, apart from white space, which chat templates trim.
fn contains(text: &str, part: &str) -> bool {
    let packed = |text: &str| text.split_whitespace().collect::<String>();
    packed(text).contains(&packed(part))
}

/// Descriptions of tools. Data sets hold their JSON in a text where schemas differ from row to row.
fn tools(tools: Option<Value>) -> Result<Vec<Value>, String> {
    let expected = |e: String| format!("`tools`: expected a list, or its JSON in a text: {e}");
    let tools = match tools {
        Some(Value::String(text)) if text.trim().is_empty() => None,
        Some(Value::String(text)) => Some(json::parse(&text).map_err(|e| expected(e.to_string()))?),
        mut tools => {
            tools.iter_mut().for_each(remove_nulls);
            tools
        }
    };
    match tools {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(tools) => serde_json::from_value(tools).map_err(|e| expected(e.to_string())),
    }
}

/// A message from its fields, and whether an answer is trained on.
fn message(mut fields: Map<String, Value>) -> Result<(Message, bool), String> {
    // Data sets of one schema have every field in every message.
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    fields.retain(|key, value| (key == "content" && value.is_string()) || !is_empty(value));
    let role = match fields.shift_remove("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role,
        Some(Value::String(role)) => {
            return Err(format!("the role `{role}` is not known; known: {}", ROLES.join(", ")));
        }
        _ => return Err("expected `role`, a text".into()),
    };
    let content = match fields.shift_remove("content") {
        Some(Value::String(content)) => content,
        // A message that only calls tools.
        None if fields.contains_key(CALLS) => {
            fields.insert(CONTENT.into(), Value::Null);
            String::new()
        }
        _ => return Err("expected `content`, a text".into()),
    };
    let weight = fields.shift_remove("weight");
    let train = match weight.as_ref().map(|weight| (role.as_str(), weight.as_f64())) {
        None | Some(("assistant", Some(1.0))) => true,
        Some(("assistant", Some(0.0))) => false,
        _ => return Err("`weight`: expected 0 or 1, of a message of the assistant".into()),
    };
    if let Some(calls) = fields.get_mut(CALLS) {
        check_calls(calls)?;
    }
    Ok((Message { role, content, fields }, train))
}

/// The object with name and arguments of each call.
fn functions(calls: &mut Value) -> impl Iterator<Item = &mut Map<String, Value>> {
    fn function(call: &mut Value) -> Option<&mut Map<String, Value>> {
        let is_inner = call.get("function").is_some_and(|function| !function.is_null());
        if is_inner { call["function"].as_object_mut() } else { call.as_object_mut() }
    }
    calls.as_array_mut().into_iter().flatten().filter_map(function)
}

/// Fails on an invalid call. A call without arguments gets an empty object.
fn check_calls(calls: &mut Value) -> Result<(), String> {
    let expected = "`tool_calls`: expected a list of {\"function\": {\"name\": \"...\", \"arguments\": {...}}}";
    let listed = calls.as_array().ok_or_else(|| format!("{expected}, found {calls}"))?.len();
    for call in functions(calls) {
        match call.get("arguments") {
            Some(Value::Object(_)) => {}
            Some(Value::String(text)) if !text.trim().is_empty() => {
                json::parse::<Map<String, Value>>(text)
                    .map_err(|e| format!("`tool_calls`: `arguments`: expected a JSON object, found `{text}`: {e}"))?;
            }
            None | Some(Value::Null | Value::String(_)) => {
                call.insert("arguments".into(), Value::Object(Map::new()));
            }
            Some(other) => return Err(format!("`tool_calls`: `arguments`: expected a JSON object, found {other}")),
        }
    }
    let named = functions(calls).filter(|call| call.get("name").is_some_and(Value::is_string)).count();
    if named < listed { Err(format!("{expected}, found {calls}")) } else { Ok(()) }
}

/// Replaces arguments of calls that are JSON in a text, as in OpenAI's format, by the object: templates write it as
/// JSON themselves.
fn parse_arguments(calls: &mut Value) {
    for call in functions(calls) {
        if let Some(Value::String(text)) = call.get("arguments")
            && let Ok(arguments) = json::parse(text)
        {
            call.insert("arguments".into(), arguments);
        }
    }
}

/// Replaces arguments that are an object by their JSON in a text, as Python writes it.
fn write_arguments(calls: &mut Value) {
    for call in functions(calls) {
        if let Some(arguments @ Value::Object(_)) = call.get("arguments") {
            let text = json::dumps(arguments);
            call.insert("arguments".into(), text.into());
        }
    }
}

/// Removes null arguments that a table such as Parquet's added, where every call has the arguments of all: those that
/// the tool does not have, and optional ones that are never null. Returns one that is left because no description of
/// its tool decides.
fn remove_absent(calls: &mut Value, tools: &[Value]) -> Option<String> {
    let mut undecided = None;
    for call in functions(calls) {
        let name = call.get("name").and_then(Value::as_str).unwrap_or_default().to_string();
        let Some(arguments) = call.get_mut("arguments").and_then(Value::as_object_mut) else { continue };
        let described =
            tools.iter().map(|tool| tool.get("function").unwrap_or(tool)).find(|tool| tool["name"] == *name);
        let parameters = described.map(|tool| &tool["parameters"]);
        arguments.retain(|key, value| match parameters {
            _ if !value.is_null() => true,
            None => {
                undecided = Some(format!("`{key}` of `{name}`"));
                true
            }
            Some(parameters) => {
                let is_required = parameters["required"].as_array().is_some_and(|keys| keys.contains(&json!(key)));
                let schema = &parameters["properties"][key.as_str()];
                is_required || (!schema.is_null() && admits_null(schema))
            }
        });
    }
    undecided
}

/// Whether null is a value of the JSON schema.
fn admits_null(schema: &Value) -> bool {
    let admits = |key: &str| schema[key].as_array().map(|schemas| schemas.iter().any(admits_null));
    match &schema["type"] {
        _ if schema["nullable"] == true => true,
        Value::String(name) => name == "null",
        Value::Array(names) => names.contains(&json!("null")),
        _ => match schema["enum"].as_array() {
            Some(values) => values.contains(&Value::Null),
            None => admits("anyOf").or(admits("oneOf")).unwrap_or(true),
        },
    }
}

/// Removes null members of JSON schemas, which only a table adds, except where null may be a value.
fn remove_nulls(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        Value::Object(fields) => {
            fields.retain(|key, value| ["default", "const"].contains(&key.as_str()) || !value.is_null());
            let is_schema = |key: &str| !["default", "const", "enum", "examples"].contains(&key);
            fields.iter_mut().filter(|(key, _)| is_schema(key)).for_each(|(_, field)| remove_nulls(field));
        }
        _ => {}
    }
}
