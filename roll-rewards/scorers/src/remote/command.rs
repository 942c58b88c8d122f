//! The reward `command`: a separate program in any language, which is started once and called over its standard input
//! and output. Its standard error is logged. `examples/reward_command/brightness.py` is a complete example.
//!
//! The program keeps no state between calls, so a program that died or hung is started again and the call is repeated.

use std::path::PathBuf;
use std::time::Duration;

use roll_core::{Error, Fault, OnMissing, Options, Result, Tensor, check_seconds};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::child::{ChildError, ChildProcess, TensorPath};
use super::{Message, OnError, RemoteReward, Transport, VERSION};
use crate::picture::Frames;

/// Options of the reward `command`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CommandConfig {
    /// The program and its arguments.
    #[schemars(extend("x-required" = true))]
    pub command: Vec<String>,
    /// Time limit of a call in seconds.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Time limit in seconds for the program's start and its answer to `hello`. The program may load a model in this
    /// time.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub start_timeout: f64,
    /// How often the program is started again for one call, after it died or exceeded the time limit.
    pub restarts: u32,
    /// Whether frames are sent through shared memory, if the program supports it.
    pub shared_memory: bool,
    /// Options of the program itself, which it receives with `hello`.
    pub options: Options,
    /// Which frames of a video are sent.
    pub frames: Frames,
    /// What happens with a sample that has nothing to score, or whose score is not finite.
    pub on_missing: OnMissing,
    /// What happens if the program answers with an error, such as an exception on one clip: `stop` ends the run; `skip`
    /// logs a warning and treats the clip as one with nothing to score (`on_missing`).
    pub on_error: OnError,
}

impl Default for CommandConfig {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            timeout: 60.0,
            start_timeout: 300.0,
            restarts: 1,
            shared_memory: true,
            options: Options::new(),
            frames: Frames::All,
            on_missing: OnMissing::Skip,
            on_error: OnError::Stop,
        }
    }
}

/// The program did not answer, although it was started again as often as allowed.
#[derive(Debug, thiserror::Error)]
#[error("the reward command `{command}` did not answer `{call}` (starts for this call: {starts})")]
struct NoAnswer {
    command: String,
    call: &'static str,
    starts: u32,
    /// The last error.
    source: ChildError,
}

/// The transport to a program that scores. It starts the program and restarts it after a failure.
pub struct Program {
    config: CommandConfig,
    /// Working directory of the program.
    directory: PathBuf,
    /// `None` before the first call and after the program died.
    process: Option<ChildProcess>,
    /// How the running program receives tensors.
    tensor_path: TensorPath,
}

impl Program {
    /// Creates the transport for the program of `config`, to be started in `directory`. Fails without a command or with
    /// invalid time limits.
    pub fn new(config: CommandConfig, directory: PathBuf) -> Result<Self> {
        if config.command.is_empty() {
            let problem = "missing: the program and its arguments, as a list of texts";
            return Err(Error::config("reward.command", problem));
        }
        check_seconds("reward.timeout", config.timeout)?;
        check_seconds("reward.start_timeout", config.start_timeout)?;
        Ok(Self { config, directory, process: None, tensor_path: TensorPath::Pipe })
    }

    /// The error of a call that failed after the last allowed start.
    fn no_answer(&self, call: &'static str, starts: u32, source: ChildError) -> Error {
        let fault = if matches!(source, ChildError::Start(_)) { Fault::User } else { Fault::Failure };
        Error::component(fault, NoAnswer { command: self.config.command.join(" "), call, starts, source })
    }

    /// Starts the program and calls `hello`.
    fn start(&mut self) -> std::result::Result<(ChildProcess, Message), ChildError> {
        let mut process = ChildProcess::start(&self.config.command, &self.directory)?;
        let header = json!({ "call": "hello", "version": VERSION, "options": self.config.options });
        let limit = Duration::from_secs_f64(self.config.start_timeout);
        let answer = process.call((header, Vec::new()), TensorPath::Pipe, limit)?;
        let (answer_header, _) = &answer;
        let accepts_shared_memory = answer_header.get("shared") == Some(&Json::Bool(true));
        self.tensor_path = if self.config.shared_memory && accepts_shared_memory {
            TensorPath::SharedMemory
        } else {
            TensorPath::Pipe
        };
        Ok((process, answer))
    }

    /// Calls the running program, or starts one. After an error no program is running.
    fn try_call(&mut self, header: &Json, tensors: &[(String, Tensor)]) -> std::result::Result<Message, ChildError> {
        let mut process = match self.process.take() {
            Some(process) => process,
            None => {
                let (process, _) = self.start()?;
                process
            }
        };
        let message = (header.clone(), tensors.to_vec());
        let answer = process.call(message, self.tensor_path, Duration::from_secs_f64(self.config.timeout))?;
        self.process = Some(process);
        Ok(answer)
    }
}

impl Transport for Program {
    fn peer(&self) -> String {
        format!("the reward command `{}`", self.config.command.join(" "))
    }

    fn hello(&mut self) -> Result<Message> {
        let (process, answer) = self.start().map_err(|source| self.no_answer("hello", 1, source))?;
        self.process = Some(process);
        Ok(answer)
    }

    fn ask(&mut self, call: &'static str, header: Json, tensors: &[(String, Tensor)]) -> Result<Message> {
        let mut restarts = 0;
        loop {
            match self.try_call(&header, tensors) {
                Ok(answer) => return Ok(answer),
                Err(problem) if restarts < self.config.restarts => {
                    restarts += 1;
                    tracing::warn!("{}: {problem}; starting it again", self.peer());
                }
                Err(problem) => return Err(self.no_answer(call, restarts, problem)),
            }
        }
    }
}

roll_core::register! {
    Reward, "command", CommandConfig,
    "A reward that is a program of its own, in any language",
    |config: CommandConfig, context| {
        let (frames, on_missing, on_error) = (config.frames, config.on_missing, config.on_error);
        let transport = Program::new(config, context.base_dir.clone())?;
        Ok(RemoteReward::new("command", transport, frames, on_missing)?.with_on_error(on_error))
    },
}

#[cfg(all(test, unix))]
#[path = "command_tests.rs"]
mod tests;
