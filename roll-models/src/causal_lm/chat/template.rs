//! A template in this process.

use std::borrow::Cow;

use minijinja::{Environment, ErrorKind, Value, context};
use roll_core::Message;
use serde::{Deserialize, Serialize};
use serde_json::Map;

/// Template name, for error messages.
const NAME: &str = "chat template";
/// Steps after which a template is taken to hang.
const FUEL: u64 = 2_000_000;

/// A template as it stands in files.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Source {
    pub source: String,
    /// Special tokens that it may write.
    pub bos: String,
    pub eos: String,
}

/// What is to be rendered.
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
    pub fn new(Source { source, bos, eos }: Source) -> Result<Self, String> {
        let mut environment = Environment::new();
        // As Hugging Face renders: a block takes its line break and the blanks before it along.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<(), minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let added = environment.add_template_owned(NAME, source);
        added.map_err(|e| format!("the chat template cannot be parsed: {}", chain(&e)))?;
        Ok(Self { environment, bos, eos })
    }

    /// The variables that it reads.
    pub fn reads(&self) -> Vec<String> {
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

/// An error with its causes, on one line.
fn chain(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
