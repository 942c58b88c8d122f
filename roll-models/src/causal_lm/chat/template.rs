//! Rendering of a template in this process.

use std::borrow::Cow;
use std::io;

use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, Value, context};
use roll_core::Message;
use serde::{Deserialize, Serialize};
use serde_json::Map;

/// Name of the template in error messages.
const NAME: &str = "chat template";
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
    pub messages: Cow<'a, [Message]>,
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
        environment.add_filter("tojson", tojson);
        let added = environment.add_template_owned(NAME, source);
        added.map_err(|e| format!("the chat template cannot be parsed: {}", chain(&e)))?;
        Ok(Self { environment, bos, eos })
    }

    /// Returns the variables that the template reads.
    pub fn variables(&self) -> Vec<String> {
        let template = self.environment.get_template(NAME);
        let mut names: Vec<String> =
            template.map(|template| template.undeclared_variables(false).into_iter().collect()).unwrap_or_default();
        names.sort();
        names
    }

    pub fn render(&self, conversation: &Conversation<'_>) -> Result<String, String> {
        let rendered = self.environment.get_template(NAME).and_then(|template| {
            template.render(context! {
                messages => &*conversation.messages,
                add_generation_prompt => conversation.add_generation_prompt,
                bos_token => self.bos,
                eos_token => self.eos,
                ..Value::from_serialize(&*conversation.arguments)
            })
        });
        rendered.map_err(|e| chain(&e))
    }
}

/// The filter `tojson` of transformers, which writes JSON as Python's `json.dumps`: with blanks after commas and colons,
/// and without unnecessary escapes.
fn tojson(value: Value, indent: Option<usize>, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    // This argument is accepted and has no effect.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        Some(indent) => {
            let blanks = " ".repeat(indent.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(blanks.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, PythonFormat)),
    };
    let failed =
        |e: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("cannot be written as JSON: {e}"));
    written.map_err(|e| failed(e.to_string()))?;
    String::from_utf8(out).map(Value::from).map_err(|e| failed(e.to_string()))
}

/// The JSON format of Python: a blank after each comma and colon.
struct PythonFormat;

impl serde_json::ser::Formatter for PythonFormat {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
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
