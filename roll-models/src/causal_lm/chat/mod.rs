//! Conversations as the model was trained to read them: its chat template.

use std::path::Path;

use minijinja::{Environment, ErrorKind, Value, context};
use roll_core::{Error, Message, Result};
use serde::Deserialize;

/// Template name, for error messages.
const NAME: &str = "chat template";
/// Steps after which a template is taken to hang.
const FUEL: u64 = 2_000_000;

/// A chat template in Jinja, and the special tokens it may write.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Further variables that it is given.
    arguments: serde_json::Map<String, serde_json::Value>,
    bos: String,
    eos: String,
}

/// The parts of `tokenizer_config.json` that matter here.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Templates>,
    bos_token: Option<Special>,
    eos_token: Option<Special>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Special {
    Text(String),
    Token { content: String },
}

impl From<Special> for String {
    fn from(special: Special) -> Self {
        match special {
            Special::Text(text) => text,
            Special::Token { content } => content,
        }
    }
}

impl ChatTemplate {
    /// The template of a model directory: `chat_template.jinja`, else the one in `tokenizer_config.json`. `None` when
    /// there is neither.
    pub fn load(directory: &Path) -> Result<Option<Self>> {
        let file = directory.join("tokenizer_config.json");
        let config: TokenizerConfig = match file.exists() {
            true => {
                let bytes = std::fs::read(&file).map_err(Error::file("read", &file))?;
                serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(&file, e.to_string()))?
            }
            false => TokenizerConfig::default(),
        };
        let own = directory.join("chat_template.jinja");
        let (source, place) = match (own.exists(), config.chat_template) {
            (true, _) => (std::fs::read_to_string(&own).map_err(Error::file("read", &own))?, own),
            (false, Some(Templates::One(template))) => (template, file),
            (false, Some(Templates::Named(mut named))) => {
                let at = named.iter().position(|n| n.name == "default").unwrap_or(0);
                if named.is_empty() {
                    return Err(Error::bad_file(file, "`chat_template` is an empty list"));
                }
                (named.swap_remove(at).template, file)
            }
            (false, None) => return Ok(None),
        };
        let text = |special: Option<Special>| special.map(String::from).unwrap_or_default();
        let template = Self::new(source, text(config.bos_token), text(config.eos_token));
        template.map(Some).map_err(|problem| Error::bad_file(place, problem))
    }

    /// A template from its source; the error says what is wrong with it.
    pub fn new(source: String, bos: String, eos: String) -> std::result::Result<Self, String> {
        let mut environment = Environment::new();
        // As Hugging Face renders: a block takes its line break and the blanks before it along.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<(), minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let added = environment.add_template_owned(NAME, source);
        added.map_err(|e| format!("the chat template cannot be parsed: {}", chain(&e)))?;
        Ok(Self { environment, arguments: serde_json::Map::new(), bos, eos })
    }

    /// Gives it further variables: `enable_thinking`. Fails on one that it does not read.
    pub fn with_arguments(mut self, arguments: serde_json::Map<String, serde_json::Value>) -> Result<Self> {
        let read = self.environment.get_template(NAME).map(|template| template.undeclared_variables(false));
        let read = read.map_err(|e| Error::Unsupported(format!("the chat template failed: {}", chain(&e))))?;
        if let Some(name) = arguments.keys().find(|name| !read.contains(*name)) {
            let problem = format!("the model's chat template does not read `{name}`");
            return Err(Error::config("model.chat_template_args", problem));
        }
        self.arguments = arguments;
        Ok(self)
    }

    /// The text of a conversation. `continue_as_assistant` ends it where the assistant speaks next.
    pub fn render(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        let template = self.environment.get_template(NAME);
        let rendered = template.and_then(|template| {
            template.render(context! {
                messages => messages,
                add_generation_prompt => continue_as_assistant,
                bos_token => self.bos,
                eos_token => self.eos,
                ..Value::from_serialize(&self.arguments)
            })
        });
        rendered.map_err(|e| Error::Unsupported(format!("the chat template failed: {}", chain(&e))))
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const CHATML: &str = "{%- if messages[0]['role'] == 'system' %}\
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\
        {%- endif %}\
        {%- for message in messages %}\
        {%- if message.role != 'system' %}\
        {{- '<|im_start|>' + message.role + '\\n' + message.content.strip() + '<|im_end|>\\n' }}\
        {%- endif %}\
        {%- endfor %}\
        {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source.into(), "<s>".into(), "</s>".into()).unwrap()
    }

    #[test]
    fn a_conversation_is_written_as_the_template_says() {
        let messages = [Message::new("system", "Be brief."), Message::new("user", " Hi \n")];
        assert_eq!(
            template(CHATML).render(&messages, true).unwrap(),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn a_template_is_given_the_arguments_that_it_reads_and_no_others() {
        let source = "{%- if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %}";
        let with = |name: &str| {
            let arguments = serde_json::json!({name: false}).as_object().unwrap().clone();
            template(source).with_arguments(arguments)
        };
        assert_eq!(template(source).render(&[], true).unwrap(), "yes");
        assert_eq!(with("enable_thinking").unwrap().render(&[], true).unwrap(), "no");
        let told = with("enable_thinkin").err().unwrap().to_string();
        assert!(told.contains("enable_thinkin") && told.contains("chat_template_args"), "{told}");
    }

    #[test]
    fn a_template_that_fails_says_why() {
        let refuses = template("{{ raise_exception('roles must alternate') }}");
        assert!(refuses.render(&[], false).unwrap_err().to_string().contains("roles must alternate"));
        let error = ChatTemplate::new("{% for %}".into(), String::new(), String::new()).err().unwrap();
        assert!(error.contains("cannot be parsed"), "{error}");
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let slow = template("{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}");
        assert!(slow.render(&[], false).is_err());
    }

    #[test]
    fn a_directory_may_name_its_template_in_three_ways() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ChatTemplate::load(dir.path()).unwrap().is_none());
        let config = |json: &str| std::fs::write(dir.path().join("tokenizer_config.json"), json).unwrap();
        let render = || ChatTemplate::load(dir.path()).unwrap().unwrap().render(&[], false).unwrap();
        config(r#"{"chat_template": "one {{ eos_token }}", "eos_token": {"content": "E"}}"#);
        assert_eq!(render(), "one E");
        config(r#"{"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}"#);
        assert_eq!(render(), "d");
        std::fs::write(dir.path().join("chat_template.jinja"), "own").unwrap();
        assert_eq!(render(), "own");
    }
}
