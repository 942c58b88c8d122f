//! Tools: commands that the agent may call before it answers its environment.
//!
//! The agent writes calls as its chat template teaches ([`parse_calls`]), for example as models of the Hermes and Qwen
//! families do, and reads the results in a turn of the role `tool`:
//!
//! ```text
//! <tool_call>
//! {"name": "calculate", "arguments": {"expression": "6 * 7"}}
//! </tool_call>
//! ```
//!
//! A command gets this object on its standard input, and writes one JSON value to its standard output. If something
//! goes wrong, the agent reads `{"error": "..."}` as the result, and the episode goes on.

mod calls;
mod process;
mod prompt;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use roll_core::{Error, Options, Result};
use roll_external::json;
use serde_json::{Value, json};

pub use calls::{ToolCall, parse_calls};
use process::Tool;
pub use prompt::result;

/// Options of a tool.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ToolOptions {
    /// Name by which the agent calls the tool.
    pub name: String,
    /// Description for the agent.
    pub description: String,
    /// JSON schema of the arguments, which are an object.
    pub parameters: Options,
    /// Program and arguments. The program gets the call as a JSON object on standard input, and writes one JSON value
    /// to standard output.
    pub command: Vec<String>,
    /// Working directory of the program. `null`: the directory that relative paths of the configuration start from.
    pub directory: Option<PathBuf>,
    /// Names of the environment variables that the program gets. It does not get any other.
    pub environment: Vec<String>,
    /// Time limit of a call in seconds. Then the program is killed, with all programs that it started.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Greatest length of the output in bytes. A program that writes more is killed.
    #[schemars(range(min = 1))]
    pub max_output_bytes: usize,
}

impl Default for ToolOptions {
    fn default() -> Self {
        Self {
            name: String::new(),
            description: String::new(),
            parameters: Options::new(),
            command: Vec::new(),
            directory: None,
            environment: vec!["PATH".into()],
            timeout: 10.0,
            max_output_bytes: 4096,
        }
    }
}

/// The tools of a run.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    tools: Vec<Tool>,
    /// Descriptions of the tools, in the form that chat templates read.
    descriptions: Vec<Value>,
    /// Whether the model's chat template writes tools, their calls and results ([`Tools::render`]); set at the first
    /// prompt.
    has_template: OnceLock<bool>,
}

impl Tools {
    /// Makes the tools from their options; nothing is started yet.
    pub fn new(options: &[ToolOptions]) -> Result<Self> {
        let mut tools = Self::default();
        for (i, tool) in options.iter().enumerate() {
            let invalid = |key: &str, problem: String| Error::config(format!("algo.tools.{i}.{key}"), problem);
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
            if tool.name.is_empty() || !tool.name.chars().all(is_plain) {
                let problem = format!("expected a name of letters, digits, `_` and `-`, found `{}`", tool.name);
                return Err(invalid("name", problem));
            }
            if tools.tools.iter().any(|other| other.options.name == tool.name) {
                return Err(invalid("name", format!("there are two tools `{}`", tool.name)));
            }
            if tool.command.first().is_none_or(String::is_empty) {
                return Err(invalid("command", "which program? For example `[python3, my_tool.py]`".into()));
            }
            let timeout = Duration::try_from_secs_f64(tool.timeout).ok().filter(|t| !t.is_zero());
            let Some(timeout) = timeout else {
                return Err(invalid(
                    "timeout",
                    format!("expected a positive number of seconds, found {}", tool.timeout),
                ));
            };
            if tool.max_output_bytes == 0 {
                return Err(invalid("max_output_bytes", "expected at least 1, found 0".into()));
            }
            tools.descriptions.push(json!({
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": schema(&tool.parameters),
                },
            }));
            tools.tools.push(Tool { options: tool.clone(), timeout });
        }
        Ok(tools)
    }

    /// Tools that somebody else runs, by their descriptions.
    pub fn described(descriptions: Vec<Value>) -> Self {
        Self { descriptions, ..Self::default() }
    }

    /// Whether there is no tool.
    pub fn is_empty(&self) -> bool {
        self.descriptions.is_empty()
    }

    /// Makes the calls of an answer ([`parse_calls`]), at most `limit` of them. Every call has a result, which is an
    /// error for calls that are invalid or beyond the limit.
    pub fn answer(&self, calls: Vec<std::result::Result<Value, String>>, limit: usize) -> Vec<ToolCall> {
        let mut made = Vec::with_capacity(calls.len());
        for (i, call) in calls.into_iter().enumerate() {
            let (tool, arguments) = match &call {
                Ok(call) => (call["name"].as_str().unwrap_or_default().to_string(), call["arguments"].clone()),
                Err(_) => (String::new(), Value::Null),
            };
            let output = match call {
                Ok(_) if i >= limit => Err("no more calls may be made in this turn".to_string()),
                Ok(call) => self.run(&tool, &call),
                Err(problem) => Err(problem),
            };
            let failed = output.is_err();
            let output = output.unwrap_or_else(|problem| json!({ "error": problem }));
            made.push(ToolCall { tool, arguments, output, failed });
        }
        made
    }

    /// Runs the tool `name` for a call, and returns the JSON value that it wrote.
    fn run(&self, name: &str, call: &Value) -> std::result::Result<Value, String> {
        let known = || self.tools.iter().map(|tool| tool.options.name.as_str()).collect::<Vec<_>>().join(", ");
        let tool = self.tools.iter().find(|tool| tool.options.name == name);
        let tool = tool.ok_or_else(|| format!("there is no tool `{name}`; there are: {}", known()))?;
        let output = tool.run(&json::compact(call))?;
        json::parse(output.trim()).map_err(|e| format!("the tool wrote no JSON: {e}"))
    }
}

/// The schema of a tool's arguments; for a tool without arguments, that of an empty object.
fn schema(parameters: &Options) -> Value {
    if parameters.is_empty() {
        return json!({ "type": "object", "properties": {} });
    }
    Value::Object(parameters.clone())
}
