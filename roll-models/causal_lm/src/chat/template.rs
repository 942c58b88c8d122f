//! Parses and renders a template in this process, with minijinja set up like the Jinja2 of transformers.

use std::borrow::Cow;
use std::collections::BTreeMap;

use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::source::{ALWAYS, rewrite};
use super::{date, python};

/// Name of the template in error messages.
const NAME: &str = "chat template";
/// Function that returns the present date. An argument of this name is a fixed date.
const STRFTIME: &str = "strftime_now";
/// Variable with the fixed date.
const FIXED_DATE: &str = "__date";
/// Variables that transformers sets to none if they are absent.
const NONE_IF_ABSENT: [&str; 2] = ["tools", "documents"];
/// Maximal number of steps of a rendering.
const FUEL: u64 = 2_000_000;

/// A template before it is parsed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TemplateSource {
    pub source: String,
    /// Special tokens that the template may write.
    pub bos: String,
    pub eos: String,
}

/// The conversation to render.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Conversation<'a> {
    pub messages: Vec<serde_json::Value>,
    pub add_generation_prompt: bool,
    pub arguments: Cow<'a, Map<String, serde_json::Value>>,
}

/// A parsed template.
pub(super) struct Template {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl Template {
    pub fn new(TemplateSource { source, bos, eos }: TemplateSource) -> Result<Self, String> {
        let mut environment = Environment::new();
        // As in transformers, the line break after a block and the blanks before it are removed.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<(), minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.set_formatter(|out, _, value| {
            std::fmt::Write::write_str(out, &python::text(value)).map_err(minijinja::Error::from)
        });
        environment.add_function(STRFTIME, |state: &minijinja::State, format: String| {
            let fixed = state.lookup(FIXED_DATE);
            date::strftime(&format, fixed.as_ref().and_then(Value::as_str))
                .map_err(|problem| minijinja::Error::new(ErrorKind::InvalidOperation, problem))
        });
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", |value: &Value| python::text(value));
        // In Python, texts and dictionaries are sequences, too.
        let is_sequence = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map);
        environment.add_test("sequence", is_sequence);
        // In Jinja2, none is not iterable, and an undefined value is an empty sequence.
        let is_iterable = move |value: &Value| {
            is_sequence(value) || matches!(value.kind(), ValueKind::Iterable | ValueKind::Undefined)
        };
        environment.add_test("iterable", is_iterable);
        environment.add_test("integer", python::is_integer);
        environment.add_test("number", |value: &Value| value.is_number() || python::is_integer(value));
        environment.add_global(ALWAYS, true);
        let added = environment.add_template_owned(NAME, rewrite(&source));
        added.map_err(|e| format!("the chat template cannot be parsed: {}", chain(&e)))?;
        Ok(Self { environment, bos, eos })
    }

    /// Returns the variables that the template reads.
    pub fn variables(&self) -> Vec<String> {
        let template = self.environment.get_template(NAME);
        // Attributes are left out.
        let nested = false;
        let mut names: Vec<String> =
            template.map(|template| template.undeclared_variables(nested).into_iter().collect()).unwrap_or_default();
        names.retain(|name| name != ALWAYS);
        names.sort();
        names
    }

    /// Renders a conversation.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<String, String> {
        let rendered = self.environment.get_template(NAME).and_then(|template| {
            let mut variables: BTreeMap<Cow<'_, str>, Value> =
                NONE_IF_ABSENT.map(|name| (name.into(), Value::from(()))).into();
            for (name, value) in &*conversation.arguments {
                let name = if name == STRFTIME { FIXED_DATE } else { name };
                variables.insert(name.into(), python::value(value));
            }
            variables.insert("messages".into(), conversation.messages.iter().map(message).collect());
            variables.insert("add_generation_prompt".into(), conversation.add_generation_prompt.into());
            variables.insert("bos_token".into(), self.bos.as_str().into());
            variables.insert("eos_token".into(), self.eos.as_str().into());
            template.render(variables)
        });
        rendered.map_err(|e| chain(&e))
    }
}

/// A message as templates read it. Thoughts, which have three names in use, are set as `thinking` and as
/// `reasoning_content`, as in transformers.
fn message(message: &serde_json::Value) -> Value {
    let mut message = message.clone();
    let thoughts = ["reasoning_content", "thinking", "reasoning"].map(|key| message[key].clone());
    if let (Some(thoughts), Some(fields)) =
        (thoughts.into_iter().find(|thoughts| !thoughts.is_null()), message.as_object_mut())
    {
        fields.entry("thinking").or_insert_with(|| thoughts.clone());
        fields.insert("reasoning_content".into(), thoughts);
    }
    python::value(&message)
}

/// Returns an error with its causes, on one line.
fn chain(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
