//! Conversations as the model was trained to read them: its chat template.
//!
//! A template is a program, and the directory of a model is often somebody else's. A program that reads such
//! directories has templates rendered by a process beside it ([`render_elsewhere`]), whose memory and time are limited:
//! whatever a template does, it ends as an error. Where nobody asked for that they are rendered on a thread, with a
//! limit on steps.

mod template;
mod worker;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use roll_core::{Error, Message, Result};
use roll_external::files;
use serde::Deserialize;

use self::template::{Conversation, Source, Template};
use self::worker::Worker;
pub use self::worker::{WORKER, serve};

/// Longer templates are refused: the longest that are published have some 20 KB.
const MAX_SOURCE: usize = 1 << 20;

/// Variable with the descriptions of tools.
const TOOLS: &str = "tools";

/// The program that renders templates.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Has the templates that are opened from now on rendered by `program`, which is called with the one argument
/// [`WORKER`] and then calls [`serve`]. Only the first call counts.
pub fn render_elsewhere(program: PathBuf) {
    let _ = PROGRAM.set(program);
}

/// A chat template in Jinja, and the special tokens it may write.
pub struct ChatTemplate {
    renderer: Mutex<Renderer>,
    /// Variables that it reads.
    reads: Vec<String>,
    /// Further variables that it is given.
    arguments: serde_json::Map<String, serde_json::Value>,
}

enum Renderer {
    Here(Template),
    Elsewhere(Worker),
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
                let bytes = files::read(&file, files::MAX_TEXT).map_err(Error::file("read", &file))?;
                serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(&file, e.to_string()))?
            }
            false => TokenizerConfig::default(),
        };
        let own = directory.join("chat_template.jinja");
        let (source, place) = match (own.exists(), config.chat_template) {
            (true, _) => (files::read_text(&own, MAX_SOURCE as u64).map_err(Error::file("read", &own))?, own),
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

    /// Parses a template; the error says why the source is invalid.
    pub fn new(source: String, bos: String, eos: String) -> std::result::Result<Self, String> {
        if source.len() > MAX_SOURCE {
            return Err(format!("the chat template has {} bytes, more than {MAX_SOURCE}", source.len()));
        }
        let source = Source { source, bos, eos };
        let (renderer, reads) = match PROGRAM.get() {
            Some(program) => {
                let (worker, reads) = Worker::start(program, source)?;
                (Renderer::Elsewhere(worker), reads)
            }
            None => {
                let template = Template::new(source)?;
                let reads = template.reads();
                (Renderer::Here(template), reads)
            }
        };
        Ok(Self { renderer: Mutex::new(renderer), reads, arguments: serde_json::Map::new() })
    }

    /// Gives it further variables: `enable_thinking`. Fails on one that it does not read.
    pub fn with_arguments(mut self, arguments: serde_json::Map<String, serde_json::Value>) -> Result<Self> {
        if let Some(name) = arguments.keys().find(|name| !self.reads.contains(*name)) {
            let problem = format!("the model's chat template does not read `{name}`");
            return Err(Error::config("model.chat_template_args", problem));
        }
        self.arguments = arguments;
        Ok(self)
    }

    /// The text of a conversation. `continue_as_assistant` ends it where the assistant speaks next.
    pub fn render(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        self.render_given(messages, continue_as_assistant, Cow::Borrowed(&self.arguments))
    }

    /// Whether it writes descriptions of tools.
    pub fn knows_tools(&self) -> bool {
        self.reads.iter().any(|name| name == TOOLS)
    }

    /// As [`ChatTemplate::render`], with descriptions of tools.
    pub fn render_with_tools(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
        continue_as_assistant: bool,
    ) -> Result<String> {
        let mut arguments = self.arguments.clone();
        arguments.insert(TOOLS.into(), tools.into());
        self.render_given(messages, continue_as_assistant, Cow::Owned(arguments))
    }

    fn render_given(
        &self,
        messages: &[Message],
        continue_as_assistant: bool,
        arguments: Cow<'_, serde_json::Map<String, serde_json::Value>>,
    ) -> Result<String> {
        let conversation =
            Conversation { messages: messages.into(), add_generation_prompt: continue_as_assistant, arguments };
        let mut renderer = self.renderer.lock().unwrap_or_else(PoisonError::into_inner);
        let rendered = match &mut *renderer {
            Renderer::Here(template) => template.render(&conversation),
            Renderer::Elsewhere(worker) => worker.render(&conversation),
        };
        rendered.map_err(|problem| Error::Unsupported(format!("the chat template failed: {problem}")))
    }
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
    fn a_template_that_knows_tools_gets_them_as_python_would_write_them() {
        let source = "{%- if tools %}{%- for tool in tools %}{{- tool | tojson }};{%- endfor %}{%- endif %}\
            {%- for message in messages %}{{- message.role + ':' + message.content + '\\n' }}{%- endfor %}";
        let tools = [serde_json::json!({"type": "function", "function": {"name": "add", "a": [1, "<é'>"], "b": {}}})];
        let messages = [Message::new("user", "6 * 7?"), Message::new("tool", "42")];
        assert!(template(source).knows_tools() && !template(CHATML).knows_tools());
        assert_eq!(
            template(source).render_with_tools(&messages, &tools, true).unwrap(),
            "{\"type\": \"function\", \"function\": {\"name\": \"add\", \"a\": [1, \"<é'>\"], \"b\": {}}};\
             user:6 * 7?\ntool:42\n"
        );
        assert_eq!(template(source).render(&messages[..1], true).unwrap(), "user:6 * 7?\n");
    }

    #[test]
    fn a_template_that_fails_says_why() {
        let refuses = template("{{ raise_exception('roles must alternate') }}");
        assert!(refuses.render(&[], false).unwrap_err().to_string().contains("roles must alternate"));
        let refused = |source: String| ChatTemplate::new(source, String::new(), String::new()).err().unwrap();
        assert!(refused("{% for %}".into()).contains("cannot be parsed"));
        assert!(refused("x".repeat(MAX_SOURCE + 1)).contains("more than 1048576"));
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
