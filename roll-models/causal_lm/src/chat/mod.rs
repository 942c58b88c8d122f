//! The chat template of a model, which formats conversations as in the model's training.
//!
//! A template is a program (in Jinja) from files that are not trusted. After a call of [`render_in_worker`], templates
//! are rendered by a worker process whose memory and time are limited, so that nothing worse than an error can happen.
//! Without such a call they are rendered in this process, with a limit on steps.

mod date;
mod python;
mod source;
mod template;
mod worker;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use roll_core::{Error, Message, Result};
use roll_external::files;
use serde_json::{Map, Value};

use self::template::{Conversation, Template, TemplateSource};
use self::worker::Worker;
pub use self::worker::{WORKER, serve};

/// The template variable that switches thinking on or off.
const THINKING: &str = "enable_thinking";

/// Maximal size of a template in bytes. The longest published templates have some 20 KB.
const MAX_SOURCE: usize = 1 << 20;

/// Name of the template that transformers uses for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// The template variable with the descriptions of tools.
const TOOLS: &str = "tools";

/// The program of the worker processes that render templates.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Renders the templates that are opened from now on in processes of `program`, which must call [`serve`] if its only
/// argument is [`WORKER`]. Only the first call has an effect.
pub fn render_in_worker(program: PathBuf) {
    let _ = PROGRAM.set(program);
}

/// A chat template in Jinja, with the special tokens that it may write.
pub struct ChatTemplate {
    renderer: Mutex<Renderer>,
    /// The template `tool_use`, which renders conversations with tools.
    with_tools: Option<Mutex<Renderer>>,
    /// Variables that the template reads.
    variables: Vec<String>,
    /// Values of further variables.
    arguments: Map<String, Value>,
}

/// A template and where it is rendered.
enum Renderer {
    /// Rendered in this process.
    Local(Template),
    /// Rendered in a worker process.
    Worker(Worker),
}

impl ChatTemplate {
    /// Loads the template of a model directory: `chat_template.jinja`, else the template in `tokenizer_config.json`. If
    /// `additional_chat_templates/` or `tokenizer_config.json` has a template `tool_use`, it renders conversations with
    /// tools. Returns `None` if there is no template.
    pub fn load(directory: &Path) -> Result<Option<Self>> {
        let config_file = directory.join("tokenizer_config.json");
        let config: Map<String, Value> = if config_file.exists() {
            let bytes = files::read_filled(&config_file, files::MAX_TEXT).map_err(Error::file("read", &config_file))?;
            serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(&config_file, e.to_string()))?
        } else {
            Map::new()
        };
        let jinja = directory.join("chat_template.jinja");
        let tools_jinja = directory.join("additional_chat_templates").join(format!("{TOOL_USE}.jinja"));
        let read = |path: &Path| files::read_text(path, MAX_SOURCE as u64).map_err(Error::file("read", path));
        let mut with_tools = tools_jinja.exists().then(|| read(&tools_jinja)).transpose()?;
        let (source, path) = match (jinja.exists(), config.get("chat_template")) {
            // A file of its own.
            (true, _) => (read(&jinja)?, jinja),
            (false, None | Some(Value::Null)) => return Ok(None),
            // One template in the configuration.
            (false, Some(Value::String(template))) => (template.clone(), config_file),
            // A list of named templates in the configuration.
            (false, Some(list)) => {
                let list = list.as_array().map_or(&[][..], Vec::as_slice);
                let template_called = |name: &str| {
                    let entry = list.iter().find(|entry| entry["name"] == name);
                    entry.and_then(|entry| entry["template"].as_str()).map(String::from)
                };
                with_tools = with_tools.or_else(|| template_called(TOOL_USE));
                let first = || list.first().and_then(|entry| entry["template"].as_str()).map(String::from);
                let Some(template) = template_called("default").or_else(first) else {
                    let problem = "`chat_template`: expected a text, or a list of entries with `name` and `template`";
                    return Err(Error::bad_file(config_file, problem));
                };
                (template, config_file)
            }
        };
        // A special token is a text, or an object with its text in `content`.
        let special = |key: &str| {
            let token = config.get(key).unwrap_or(&Value::Null);
            token.as_str().or(token["content"].as_str()).unwrap_or_default().to_string()
        };
        let open = |source| Self::new(source, special("bos_token"), special("eos_token"));
        let bad = |problem| Error::bad_file(&path, problem);
        let mut template = open(source).map_err(bad)?;
        if let Some(source) = with_tools {
            let with_tools = open(source).map_err(|problem| bad(format!("`{TOOL_USE}`: {problem}")))?;
            template.variables.extend(with_tools.variables);
            template.with_tools = Some(with_tools.renderer);
        }
        Ok(Some(template))
    }

    /// Parses a template. `bos` and `eos` are the special tokens that it may write.
    pub fn new(source: String, bos: String, eos: String) -> Result<Self, String> {
        if source.len() > MAX_SOURCE {
            return Err(format!("the chat template has {} bytes, more than {MAX_SOURCE}", source.len()));
        }
        let source = TemplateSource { source, bos, eos };
        let (renderer, variables) = match PROGRAM.get() {
            Some(program) => {
                let (worker, variables) = Worker::start(program, source)?;
                (Renderer::Worker(worker), variables)
            }
            None => {
                let template = Template::new(source)?;
                let variables = template.variables();
                (Renderer::Local(template), variables)
            }
        };
        Ok(Self { renderer: Mutex::new(renderer), with_tools: None, variables, arguments: Map::new() })
    }

    /// Sets further variables, such as `enable_thinking`. Fails on a variable that the template does not read. The
    /// exception is `enable_thinking: false`, because most models whose template does not read it do not think.
    pub fn with_arguments(mut self, mut arguments: Map<String, Value>) -> Result<Self> {
        let reads_thinking = self.variables.iter().any(|name| name == THINKING);
        if !reads_thinking && arguments.get(THINKING) == Some(&Value::Bool(false)) {
            arguments.remove(THINKING);
            tracing::info!(
                "the model's chat template does not read `{THINKING}`: a model that thinks goes on thinking"
            );
        }
        if let Some(name) = arguments.keys().find(|name| !self.variables.contains(*name)) {
            let problem = format!("the model's chat template does not read `{name}`");
            return Err(Error::config("model.chat_template_args", problem));
        }
        self.arguments = arguments;
        Ok(self)
    }

    /// Renders a conversation. With `continue_as_assistant` the text ends where the assistant's next message begins.
    pub fn render(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        self.render_with(messages, continue_as_assistant, Cow::Borrowed(&self.arguments))
    }

    /// Whether the template writes descriptions of tools.
    pub fn supports_tools(&self) -> bool {
        self.variables.iter().any(|name| name == TOOLS)
    }

    /// Like [`ChatTemplate::render`], with descriptions of tools.
    pub fn render_with_tools(
        &self,
        messages: &[Message],
        tools: &[Value],
        continue_as_assistant: bool,
    ) -> Result<String> {
        let mut arguments = self.arguments.clone();
        arguments.insert(TOOLS.into(), tools.into());
        self.render_with(messages, continue_as_assistant, Cow::Owned(arguments))
    }

    fn render_with(
        &self,
        messages: &[Message],
        continue_as_assistant: bool,
        arguments: Cow<'_, Map<String, Value>>,
    ) -> Result<String> {
        let has_tools = arguments.contains_key(TOOLS);
        let with_tools = if has_tools { self.with_tools.as_ref() } else { None };
        let conversation = Conversation {
            messages: messages.iter().map(fields).collect(),
            add_generation_prompt: continue_as_assistant,
            arguments,
        };
        let mut renderer = with_tools.unwrap_or(&self.renderer).lock().unwrap_or_else(PoisonError::into_inner);
        let rendered = match &mut *renderer {
            Renderer::Local(template) => template.render(&conversation),
            Renderer::Worker(worker) => worker.render(&conversation),
        };
        rendered.map_err(|problem| Error::Unsupported(format!("the chat template failed: {problem}")))
    }
}

/// A message as one object: role, text as `content`, and further fields. A field `content` replaces the text, which is
/// null if a message only calls tools.
fn fields(message: &Message) -> Value {
    let mut fields = Map::new();
    fields.insert("role".into(), message.role.clone().into());
    fields.insert("content".into(), message.content.clone().into());
    fields.extend(message.fields.clone());
    Value::Object(fields)
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
    fn renders_chatml() {
        let messages = [Message::new("system", "Be brief."), Message::new("user", " Hi \n")];
        assert_eq!(
            template(CHATML).render(&messages, true).unwrap(),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn rejects_arguments_that_the_template_does_not_read() {
        let source = "{%- if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %}";
        let with = |name: &str| {
            let arguments = serde_json::json!({name: false}).as_object().unwrap().clone();
            template(source).with_arguments(arguments)
        };
        let no_thoughts = || serde_json::json!({"enable_thinking": false}).as_object().unwrap().clone();
        assert_eq!(template(source).render(&[], true).unwrap(), "yes");
        assert_eq!(with("enable_thinking").unwrap().render(&[], true).unwrap(), "no");
        assert_eq!(template("plain").with_arguments(no_thoughts()).unwrap().render(&[], true).unwrap(), "plain");
        let message = with("enable_thinkin").err().unwrap().to_string();
        assert!(message.contains("enable_thinkin") && message.contains("chat_template_args"), "{message}");
    }

    #[test]
    fn renders_tools_in_the_json_of_python() {
        let source = "{%- if tools %}{%- for tool in tools %}{{- tool | tojson }};{%- endfor %}{%- endif %}\
            {%- for message in messages %}{{- message.role + ':' + message.content + '\\n' }}{%- endfor %}";
        let tools = [serde_json::json!({"type": "function", "function": {"name": "add", "a": [1, "<é'>"], "b": {}}})];
        let messages = [Message::new("user", "6 * 7?"), Message::new("tool", "42")];
        assert!(template(source).supports_tools() && !template(CHATML).supports_tools());
        assert_eq!(
            template(source).render_with_tools(&messages, &tools, true).unwrap(),
            "{\"type\": \"function\", \"function\": {\"name\": \"add\", \"a\": [1, \"<é'>\"], \"b\": {}}};\
             user:6 * 7?\ntool:42\n"
        );
        assert_eq!(template(source).render(&messages[..1], true).unwrap(), "user:6 * 7?\n");
    }

    #[test]
    fn error_of_a_failing_template_has_its_reason() {
        let refuses = template("{{ raise_exception('roles must alternate') }}");
        assert!(refuses.render(&[], false).unwrap_err().to_string().contains("roles must alternate"));
        let refused = |source: String| ChatTemplate::new(source, String::new(), String::new()).err().unwrap();
        assert!(refused("{% for %}".into()).contains("cannot be parsed"));
        assert!(refused("x".repeat(MAX_SOURCE + 1)).contains("more than 1048576"));
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let mut message = Message::new("user", "");
        message.fields = serde_json::json!({"content": null, "thinking": "hm"}).as_object().unwrap().clone();
        for (source, expected) in [
            (
                "{{ [1, 1e-7, 1e16, 2.0, none, true, 'a', \"it's\", {'k': 'v\n'}] }}",
                "[1, 1e-07, 1e+16, 2.0, None, True, 'a', \"it's\", {'k': 'v\\n'}]",
            ),
            (
                "{{ [none is iterable, missing is iterable, 'a' is iterable, {} is iterable, 1 is iterable] }}",
                "[False, True, True, True, False]",
            ),
            ("{{ ('' and 'x') ~ '[' ~ (0 and 1) ~ ']' }}{{ missing and missing + ': ' }}", "[0]"),
            ("{{ {'b': [1], 'a': 'é'} | tojson(sort_keys=true) }}", "{\"a\": \"é\", \"b\": [1]}"),
            ("{{ {'b': [1], 'a': 'é'} | tojson(separators=(',', ':')) }}", "{\"b\":[1],\"a\":\"é\"}"),
            ("{{ '😀é' | tojson(true) }}", "\"\\ud83d\\ude00\\u00e9\""),
            (
                "{{ {'b': [1, {}], 'a': 1e-7} | tojson(indent=2) }}",
                "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": 1e-07\n}",
            ),
            ("{% generation %}{{ messages[0].reasoning_content }}{% endgeneration %}\r\n.", "hm."),
            ("{{ messages[0].content is none }} {{ tools is none }} {{ documents is defined }}", "True True True"),
        ] {
            assert_eq!(template(source).render(&[message.clone()], false).unwrap(), expected, "{source}");
        }
        let arguments = r#"{"wei": [1000000000000000000000, -0, 1e21, 1e-7],
            "most": 115792089237316195423570985008687907853269984665640564039457584007913129639936}"#;
        let mut paid = Message::new("assistant", "");
        paid.fields.insert("arguments".into(), roll_external::json::parse(arguments).unwrap());
        for (source, expected) in [
            (
                "{{ messages[0].arguments | tojson }}",
                "{\"wei\": [1000000000000000000000, 0, 1e+21, 1e-07], \"most\": \
                 115792089237316195423570985008687907853269984665640564039457584007913129639936}",
            ),
            ("{{ messages[0].arguments.wei }}", "[1000000000000000000000, 0, 1e+21, 1e-07]"),
            ("{{ messages[0].arguments.wei[0] + 1 }}", "1000000000000000000001"),
            (
                "{{ messages[0].arguments.most ~ '' }}",
                "115792089237316195423570985008687907853269984665640564039457584007913129639936",
            ),
            (
                "{% for x in [messages[0].arguments.most, 1, 1.5] %}\
                 {{ [x is number, x is integer, x is string, x is mapping] }}{% endfor %}",
                "[True, True, False, False][True, True, False, False][True, False, False, False]",
            ),
        ] {
            assert_eq!(template(source).render(&[paid.clone()], false).unwrap(), expected, "{source}");
        }
        let dated = serde_json::json!({"strftime_now": "2026-07-04"}).as_object().unwrap().clone();
        let dated = template("{{ strftime_now('%d %B %Y') }}").with_arguments(dated).unwrap();
        assert_eq!(dated.render(&[], false).unwrap(), "04 July 2026");
        let problem = template("{{ missing | tojson }}").render(&[], false).unwrap_err().to_string();
        assert!(problem.contains("undefined"), "{problem}");
    }

    #[test]
    fn stops_a_template_after_its_maximal_number_of_steps() {
        let slow = template("{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}");
        assert!(slow.render(&[], false).is_err());
    }

    #[test]
    fn loads_templates_from_their_three_places() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ChatTemplate::load(dir.path()).unwrap().is_none());
        let config = |json: &str| std::fs::write(dir.path().join("tokenizer_config.json"), json).unwrap();
        let render = || ChatTemplate::load(dir.path()).unwrap().unwrap().render(&[], false).unwrap();
        config(r#"{"chat_template": "one {{ eos_token }}", "eos_token": {"content": "E"}}"#);
        assert_eq!(render(), "one E");
        config(r#"{"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}"#);
        assert_eq!(render(), "d");
        config(
            r#"{"chat_template": [{"name": "tool_use", "template": "t{{ tools }}"}, {"name": "default", "template": "d"}]}"#,
        );
        let named = ChatTemplate::load(dir.path()).unwrap().unwrap();
        assert!(named.supports_tools());
        assert_eq!(named.render_with_tools(&[], &["a'b".into()], false).unwrap(), "t[\"a'b\"]");
        assert_eq!(named.render(&[], false).unwrap(), "d");
        std::fs::write(dir.path().join("chat_template.jinja"), "own").unwrap();
        assert_eq!(render(), "own");
    }
}
