//! Conversations: read from a file, rendered by the model's chat template, and tokenized with a mark on the tokens that
//! are trained on. What algorithms on conversations share: their padded batches (`batch`), the order in which steps take
//! them (`order`), and answers to held-out ones (`answers`).

pub(crate) mod answers;
pub(crate) mod batch;
pub(crate) mod order;
mod rows;
mod trained_on;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use roll_core::{Error, LanguageModel, Message, Result};
use roll_external::{files, json};
use serde_json::{Map, Value, json};

pub(crate) use self::rows::normalised;
pub(crate) use self::trained_on::TrainedOn;
use crate::json_rows;
use crate::pieces::tokenize_after;

/// Roles of messages in chat templates. Any other role (`human`, `gpt`) means that the data set has another form, of
/// which nothing would be trained on.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// Fields of a tool's result that name the call which it answers. Many chat templates do not write them, because the
/// order of messages says the same.
const LINKS: [&str; 2] = ["tool_call_id", "name"];

/// Field with calls of tools.
const CALLS: &str = "tool_calls";

/// Key of [`Message::fields`] that is null for a message without a text, which only calls tools. Some templates read
/// it.
const CONTENT: &str = "content";

/// Which tokens are trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// Tokens of the assistant's messages.
    #[default]
    Responses,
    /// All tokens, also those of the template: pretraining.
    All,
}

/// One conversation of a file.
#[derive(serde::Deserialize)]
struct Entry {
    messages: Vec<Map<String, Value>>,
    /// Descriptions of tools: a list, or its JSON in a text.
    tools: Option<Value>,
    /// All other keys, which have no effect.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A conversation.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    /// Place of the conversation in the file: `line 3`, or `entry 3` of a JSON list.
    place: String,
    messages: Vec<Message>,
    /// Positions of the answers of weight 0, which are not trained on.
    untrained: Vec<usize>,
    /// Descriptions of tools.
    tools: Vec<Value>,
    /// One null argument of a call whose tool is not described, for a warning; see [`remove_absent`].
    undecided: Option<String>,
    /// Whether this is the form that [`Conversations::check`] found, of which the chat template writes every field.
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
    /// Ids of the tokens.
    pub ids: Vec<u32>,
    /// Whether each token is trained on.
    pub train: Vec<bool>,
}

/// A sample as text, cut where an answer of the assistant begins or ends: the pieces, and whether each is trained on.
type Pieces = Vec<(String, bool)>;

impl Tokens {
    /// Number of tokens that are trained on. The first token does not count, because it is not predicted.
    pub fn trained(&self) -> usize {
        self.train.iter().skip(1).filter(|train| **train).count()
    }

    /// The tokens before the last answer that is trained on, and the tokens of that answer. `None` if there is no such
    /// answer or nothing before it.
    pub(crate) fn last_answer(self) -> Option<[Vec<u32>; 2]> {
        let end = self.train.iter().rposition(|train| *train)? + 1;
        let begin = self.train[..end].iter().rposition(|train| !*train)? + 1;
        Some([self.ids[..begin].to_vec(), self.ids[begin..end].to_vec()])
    }

    /// Whether the sample has a token that is trained on, and at most `limit` tokens.
    pub(crate) fn is_usable(&self, limit: usize) -> bool {
        self.ids.len() <= limit && self.trained() > 0
    }
}

impl Conversation {
    /// A text that is the same for equal messages and tools.
    fn identity(&self) -> String {
        serde_json::json!([self.messages, self.tools]).to_string()
    }
}

impl Conversations {
    /// The number of these conversations that `other` contains, too.
    pub(crate) fn count_in(&self, other: &Self) -> usize {
        let others: BTreeSet<String> = other.rows.iter().map(Conversation::identity).collect();
        self.rows.iter().filter(|row| others.contains(&row.identity())).count()
    }

    /// A text that differs from those of other conversations, and of these in another order.
    pub(crate) fn identity(&self) -> String {
        self.rows.iter().map(Conversation::identity).collect()
    }

    /// Reads JSON lines (empty lines are skipped) or a JSON list. Fails on an entry that is not a conversation, and on
    /// a file without entries.
    pub fn read(file: &Path) -> Result<Self> {
        let mut reader = Reader::default();
        let rows =
            read_rows(file, "conversations", rows::EXPECTED, |place, row| reader.read(place, rows::normalised(row)?))?;
        reader.warn(file, "`messages` and `tools`", &rows);
        if rows.is_empty() {
            return Err(Error::bad_file(file, "expected conversations, one a line or a JSON list; found none"));
        }
        Ok(Self::new(file, rows))
    }

    /// The conversations `rows` of `file`.
    pub(crate) fn new(file: &Path, rows: Vec<Conversation>) -> Self {
        Self { file: file.into(), rows }
    }

    /// The file.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// File and place of a row, for messages.
    pub fn origin(&self, row: usize) -> String {
        format!("{}: {}", self.file.display(), self.rows[row].place)
    }

    /// Renders every row, so that an invalid row is found before the first step, and keeps the form of it that the chat
    /// template writes. Fails also if no row can be trained on. `key` is the option that names the file.
    pub(crate) fn check(
        &mut self,
        key: &str,
        train_on: TrainOn,
        limit: usize,
        model: &dyn LanguageModel,
    ) -> Result<()> {
        // Number of conversations that are several samples, and whether any sample so far can be trained on.
        let (mut split, mut any_usable) = (0, false);
        for row in 0..self.rows.len() {
            let samples = self.settle(row, train_on, model)?;
            split += usize::from(samples.len() > 1);
            // Tokenizing is much slower than rendering, and is left out once a usable sample is found.
            for sample in samples {
                any_usable = any_usable || tokens(sample, train_on, model)?.is_usable(limit);
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
        if !any_usable {
            let problem = format!(
                "no conversation of {} has a token to train on within {limit} tokens (`algo.sequence_length`)",
                self.file.display()
            );
            return Err(Error::config(key, problem));
        }
        Ok(())
    }

    /// Renders a row, keeps the form of it that the chat template writes, and returns its samples as text.
    pub(crate) fn settle(&mut self, row: usize, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Vec<Pieces>> {
        let (form, samples) = self.form(row, train_on, model)?;
        self.rows[row] = form;
        Ok(samples)
    }

    /// The samples of a row: the whole conversation, or one sample per answer if the chat template rewrites earlier
    /// answers.
    pub fn samples(&self, row: usize, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Vec<Tokens>> {
        let (_, samples) = self.form(row, train_on, model)?;
        samples.into_iter().map(|sample| tokens(sample, train_on, model)).collect()
    }

    /// The first form of a row of which the chat template writes every field, and the samples of that form as text.
    /// Fails with the problem of the first form if no form is written.
    fn form(&self, row: usize, train_on: TrainOn, model: &dyn LanguageModel) -> Result<(Conversation, Vec<Pieces>)> {
        let conversation = &self.rows[row];
        let checked = |form: Conversation| {
            form.check_fields(train_on, model)?;
            form.samples(train_on, model).map(|samples| (Conversation { is_checked: true, ..form }, samples))
        };
        let form_and_samples = if conversation.is_checked {
            conversation.samples(train_on, model).map(|samples| (conversation.clone(), samples))
        } else {
            let mut forms = conversation.forms(model);
            let first = forms.next().unwrap_or_else(|| conversation.clone());
            checked(first).or_else(|problem| forms.find_map(|form| checked(form).ok()).ok_or(problem))
        };
        form_and_samples.map_err(|error| match error {
            Error::Unsupported(problem) => Error::bad_file(&self.file, format!("{}: {problem}", conversation.place)),
            error => Error::Context { doing: self.origin(row), source: Box::new(error) },
        })
    }
}

/// Reads every row of `file`, JSON lines or a JSON list of `what`, each such as `expected`. `parse` gets a row's place in
/// the file and its value. Fails on the first row that is not JSON or that `parse` rejects.
pub(crate) fn read_rows<T>(
    file: &Path,
    what: &str,
    expected: &str,
    mut parse: impl FnMut(&str, Value) -> Result<T, String>,
) -> Result<Vec<T>> {
    let text = files::read_text(file, json_rows::MAX_BYTES).map_err(Error::file("read", file))?;
    let mut rows = Vec::new();
    for json_rows::Row { place, value } in json_rows::rows(file, &text, what)? {
        let value = value.map_err(|e| format!("expected an object such as {expected}: {e}"));
        let row = value.and_then(|value| parse(&place, value));
        rows.push(row.map_err(|problem| Error::bad_file(file, format!("{place}: {problem}")))?);
    }
    Ok(rows)
}

/// Reads conversations of one file, and collects what a warning should name.
#[derive(Default)]
pub(crate) struct Reader {
    /// Keys without an effect.
    others: BTreeSet<String>,
}

impl Reader {
    /// The conversation of a row with the key `messages`.
    pub(crate) fn read(&mut self, place: &str, row: Value) -> Result<Conversation, String> {
        let expected = |e: serde_json::Error| format!("expected an object such as {}: {e}", rows::EXPECTED);
        let mut entry: Entry = serde_json::from_value(row).map_err(expected)?;
        self.others.extend(std::mem::take(&mut entry.others).into_iter().map(|(key, _)| key));
        Conversation::parse(place.into(), entry)
    }

    /// Warns of keys without an effect, which are all but `known`, and of arguments that a table may have added.
    pub(crate) fn warn<'a>(self, file: &Path, known: &str, conversations: impl IntoIterator<Item = &'a Conversation>) {
        if !self.others.is_empty() {
            let keys = self.others.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            tracing::warn!("{}: keys beside {known} have no effect: {keys}", file.display());
        }
        let undecided = |row: &'a Conversation| Some((&row.place, row.undecided.as_ref()?));
        if let Some((place, argument)) = conversations.into_iter().find_map(undecided) {
            tracing::warn!(
                "{}: {place}: the argument {argument} is null and written as such: describe the tool in `tools` if a \
                 table (Parquet) added it, so that it is left out",
                file.display(),
            );
        }
    }
}

/// A sample as tokens.
fn tokens(pieces: Pieces, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Tokens> {
    let ends = model.end_tokens();
    let mut tokens = Tokens { ids: Vec::new(), train: Vec::new() };
    let mut before = String::new();
    for (text, train) in pieces {
        let ids = tokenize_after(model, &before, &text, &[])?;
        // An answer is trained on up to the token that ends it, because no model generates the text that the template
        // writes after that token.
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
    fn parse(place: String, entry: Entry) -> Result<Self, String> {
        if entry.messages.is_empty() {
            return Err("expected at least one message, found none".into());
        }
        let tools = parse_tools(entry.tools)?;
        let (mut messages, mut untrained, mut undecided) = (Vec::new(), Vec::new(), None);
        for (i, fields) in entry.messages.into_iter().enumerate() {
            let parsed = parse_message(fields);
            let (mut message, train) = parsed.map_err(|problem| format!("message {}: {problem}", i + 1))?;
            undecided = undecided.or(message.fields.get_mut(CALLS).and_then(|calls| remove_absent(calls, &tools)));
            messages.push(message);
            if !train {
                untrained.push(i);
            }
        }
        Ok(Self { place, messages, untrained, tools, undecided, is_checked: false })
    }

    /// The number of messages that both conversations begin with.
    pub(crate) fn common_messages(&self, other: &Self) -> usize {
        self.messages.iter().zip(&other.messages).take_while(|(message, other)| message == other).count()
    }

    /// The roles of its messages.
    pub(crate) fn roles(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().map(|message| message.role.as_str())
    }

    /// Excludes the answers among the first `count` messages from training. Returns whether any answer is left.
    pub(crate) fn train_after(&mut self, count: usize) -> bool {
        let answers = (0..self.messages.len()).filter(|i| self.messages[*i].role == "assistant");
        let (mut untrained, left): (Vec<usize>, Vec<usize>) =
            answers.partition(|i| *i < count || self.untrained.contains(i));
        std::mem::swap(&mut self.untrained, &mut untrained);
        !left.is_empty()
    }

    /// The forms of this conversation that a chat template may read, in the order in which they are tried. Arguments of
    /// calls are objects, then JSON in a text. For each of these, `content` of a message without a text is null, then
    /// an empty text. Null is left out for templates that write it as the word `None`.
    fn forms<'a>(&'a self, model: &'a dyn LanguageModel) -> impl Iterator<Item = Self> + 'a {
        let has_calls = self.messages.iter().any(|message| message.fields.contains_key(CALLS));
        let to_objects: fn(&mut Value) = arguments_to_objects;
        let to_texts: fn(&mut Value) = arguments_to_texts;
        let unchanged: fn(&mut Value) = |_| ();
        let rewrites = if has_calls { vec![to_objects, to_texts] } else { vec![unchanged] };
        rewrites.into_iter().flat_map(move |rewrite| {
            let mut with_null = self.clone();
            with_null.messages.iter_mut().filter_map(|message| message.fields.get_mut(CALLS)).for_each(rewrite);
            let mut with_empty_text = with_null.clone();
            with_empty_text.messages.iter_mut().for_each(|message| drop(message.fields.shift_remove(CONTENT)));
            let count_none =
                |form: &Self| form.render_complete(&form.messages, model).map(|text| text.matches("None").count());
            let writes_none = || match (count_none(&with_null), count_none(&with_empty_text)) {
                (Ok(with_null), Ok(with_empty_text)) => with_null > with_empty_text,
                _ => false,
            };
            let keeps_null = with_empty_text.messages != with_null.messages && !writes_none();
            keeps_null.then_some(with_null).into_iter().chain([with_empty_text])
        })
    }

    /// The text of `messages`, which ends with the last message.
    fn render_complete(&self, messages: &[Message], model: &dyn LanguageModel) -> Result<String> {
        self.render(messages, false, model)
    }

    /// The text of `messages`, and after them the beginning of an answer of the assistant.
    fn render_prompt(&self, messages: &[Message], model: &dyn LanguageModel) -> Result<String> {
        self.render(messages, true, model)
    }

    /// The text of `messages`, with the tools of this conversation.
    fn render(&self, messages: &[Message], continue_as_assistant: bool, model: &dyn LanguageModel) -> Result<String> {
        if self.tools.is_empty() {
            return model.render_chat(messages, continue_as_assistant);
        }
        let rendered = model.render_chat_with_tools(messages, &self.tools, continue_as_assistant)?;
        rendered.ok_or_else(|| Error::Unsupported("the model's chat template does not write `tools`".into()))
    }

    /// Fails on a field of a message without an effect on the text, because the model would not be trained on it.
    fn check_fields(&self, train_on: TrainOn, model: &dyn LanguageModel) -> Result<()> {
        if train_on == TrainOn::All
            && let Some(i) = self.untrained.first()
        {
            let problem = format!("message {}: `weight: 0` has no effect with `algo.train_on: all`", i + 1);
            return Err(Error::Unsupported(problem));
        }
        for (i, message) in self.messages.iter().enumerate() {
            let is_result = ["tool", "function", "ipython"].contains(&message.role.as_str());
            for key in message.fields.keys() {
                let may_be_ignored = key == CONTENT || (is_result && LINKS.contains(&key.as_str()));
                if may_be_ignored {
                    continue;
                }
                let mut without = self.messages[..=i].to_vec();
                without[i].fields.remove(key);
                let with = self.render_complete(&self.messages[..=i], model)?;
                if self.render_complete(&without, model).is_ok_and(|without| without == with) {
                    let problem = format!("message {}: the model's chat template does not write `{key}`", i + 1);
                    return Err(Error::Unsupported(problem));
                }
            }
        }
        Ok(())
    }

    /// The samples as text.
    ///
    /// The conversation is one sample, its text cut before and after each answer, if that text contains each answer
    /// where the model would write it. Otherwise the template rewrites earlier answers once more messages follow, as
    /// templates that drop thoughts do. Then each answer is a sample, after the text that asks for it.
    fn samples(&self, train_on: TrainOn, model: &dyn LanguageModel) -> Result<Vec<Pieces>> {
        let all = train_on == TrainOn::All;
        let whole = self.render_complete(&self.messages, model)?;
        let (mut one_per_answer, mut pieces_of_whole) = (Vec::new(), Pieces::new());
        // The length of the text in `pieces_of_whole`; `None` once the template has rewritten something.
        let mut cut_up_to = Some(0);
        for (i, message) in self.messages.iter().enumerate().filter(|(_, message)| message.role == "assistant") {
            let before = self.render_prompt(&self.messages[..i], model)?;
            let after = self.render_complete(&self.messages[..=i], model)?;
            match after.strip_prefix(before.as_str()).filter(|answer| contains(answer, &message.content)) {
                Some(answer) => {
                    let train = all || !self.untrained.contains(&i);
                    one_per_answer.push(vec![(before.clone(), false), (answer.to_string(), train)]);
                    cut_up_to = match cut_up_to {
                        Some(begin) if whole.starts_with(&after) && begin <= before.len() => {
                            pieces_of_whole.push((before[begin..].to_string(), all));
                            pieces_of_whole.push((answer.to_string(), train));
                            Some(after.len())
                        }
                        _ => None,
                    };
                }
                // All tokens are trained on, so that no answer need be found.
                None if all => cut_up_to = None,
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
        match cut_up_to {
            Some(begin) => {
                pieces_of_whole.push((whole[begin..].to_string(), all));
                Ok(vec![pieces_of_whole])
            }
            None if all => Ok(vec![vec![(whole, true)]]),
            None => {
                let is_trained = |sample: &Pieces| sample[1].1;
                one_per_answer.retain(is_trained);
                Ok(one_per_answer)
            }
        }
    }
}

/// Whether `text` contains `excerpt` if white space, which chat templates trim, is left out of both.
fn contains(text: &str, excerpt: &str) -> bool {
    let without_space = |text: &str| text.split_whitespace().collect::<String>();
    without_space(text).contains(&without_space(excerpt))
}

/// Descriptions of tools from the entry's `tools`: a list, or its JSON in a text. Data sets use the text if schemas
/// differ from row to row.
fn parse_tools(tools: Option<Value>) -> Result<Vec<Value>, String> {
    let expected = |e: String| format!("`tools`: expected a list, or its JSON in a text: {e}");
    let tools = match tools {
        Some(Value::String(text)) if text.trim().is_empty() => None,
        Some(Value::String(text)) => Some(json::parse(&text).map_err(|e| expected(e.to_string()))?),
        // A list, in which a table may have added nulls.
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

/// A message from its fields, and whether it is trained on if it is an answer.
fn parse_message(mut fields: Map<String, Value>) -> Result<(Message, bool), String> {
    // In data sets of one schema every message has every field. An empty field counts as absent, except for the text.
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

/// The object with `name` and `arguments` of each call: the call itself, or its `function`.
fn functions(calls: &mut Value) -> impl Iterator<Item = &mut Map<String, Value>> {
    fn function(call: &mut Value) -> Option<&mut Map<String, Value>> {
        let has_function = call.get("function").is_some_and(|function| !function.is_null());
        if has_function { call["function"].as_object_mut() } else { call.as_object_mut() }
    }
    calls.as_array_mut().into_iter().flatten().filter_map(function)
}

/// Fails on an invalid call. A call without arguments gets an empty object.
fn check_calls(calls: &mut Value) -> Result<(), String> {
    let expected = "`tool_calls`: expected a list of {\"function\": {\"name\": \"...\", \"arguments\": {...}}}";
    let count = calls.as_array().ok_or_else(|| format!("{expected}, found {calls}"))?.len();
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
    if named < count { Err(format!("{expected}, found {calls}")) } else { Ok(()) }
}

/// Replaces arguments of calls that are JSON in a text, as in OpenAI's format, by the object. Many templates convert it
/// to JSON themselves.
fn arguments_to_objects(calls: &mut Value) {
    for call in functions(calls) {
        if let Some(Value::String(text)) = call.get("arguments")
            && let Ok(arguments) = json::parse(text)
        {
            call.insert("arguments".into(), arguments);
        }
    }
}

/// Replaces arguments of calls that are an object by their JSON in a text, as Python writes it.
fn arguments_to_texts(calls: &mut Value) {
    for call in functions(calls) {
        if let Some(arguments @ Value::Object(_)) = call.get("arguments") {
            let text = json::dumps(arguments);
            call.insert("arguments".into(), text.into());
        }
    }
}

/// Removes null arguments that a table, such as Parquet's, has added: in a table every call has the arguments of all
/// calls. A null argument is removed if the tool does not have it, or if it is optional and its schema does not admit
/// null. Without a description of the tool that cannot be decided: null arguments are kept, and one of them is
/// returned.
fn remove_absent(calls: &mut Value, tools: &[Value]) -> Option<String> {
    let mut undecided = None;
    for call in functions(calls) {
        let name = call.get("name").and_then(Value::as_str).unwrap_or_default().to_string();
        let Some(arguments) = call.get_mut("arguments").and_then(Value::as_object_mut) else { continue };
        let description =
            tools.iter().map(|tool| tool.get("function").unwrap_or(tool)).find(|tool| tool["name"] == *name);
        arguments.retain(|key, value| {
            if !value.is_null() {
                return true;
            }
            let Some(description) = description else {
                undecided = Some(format!("`{key}` of `{name}`"));
                return true;
            };
            let parameters = &description["parameters"];
            let is_required = parameters["required"].as_array().is_some_and(|keys| keys.contains(&json!(key)));
            let schema = &parameters["properties"][key.as_str()];
            is_required || (!schema.is_null() && admits_null(schema))
        });
    }
    undecided
}

/// Whether the JSON schema admits null. A schema that says nothing about types does.
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

/// Removes null members of JSON schemas, which only a table adds. `default` and `const` are kept, because null may be
/// their value; values in `enum` and `examples` as well.
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
