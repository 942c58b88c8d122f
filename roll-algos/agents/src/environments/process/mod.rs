//! An environment in a separate process, in any language: one JSON object per line, on stdin and stdout.
//!
//! ```text
//! -> {"reset": {"seed": 7, "split": "train", "number": 12}}
//!                                                    `split` is "validation" for validations; `number` is that of
//!                                                    the group of episodes, which all have the same start
//! <- {"observation": "..."}                          also "instructions", shown once before the first observation,
//!                                                    and "pictures", PNGs in base64 at the marks (U+FFFC) of the
//!                                                    observation, or before it
//! -> {"step": {"action": "<answer>Left</answer>"}}
//! <- {"observation": "...", "reward": 0.5, "terminated": false}
//!                                                    also "truncated", "valid" (true unless given), "solved",
//!                                                    "action" (for the history of prompts)
//! -> {"close": true}                                 the episode is over; only sent if the answer to `reset` has
//!                                                    "closes": true
//! <- {}                                              any object
//! <- {"error": "..."}                                instead of an answer: the episode is left out, and the process
//!                                                    plays the next one
//! ```

pub(super) mod child;
pub(super) mod limits;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use roll_core::{BuildContext, Error, Observation, Result, Transition, check_seconds};

use super::protocol::{self, Answer, RemoteEnvironment, Start, Transcript, Transport, warn_once};
use child::{Child, ChildOptions};
use limits::{Descriptors, StartPermit};

const NAME: &str = "process";

/// Options of the environment `process`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProcessOptions {
    /// Program and arguments.
    #[schemars(extend("x-required" = true))]
    pub command: Vec<String>,
    /// Working directory. `null`: the directory that relative paths of the configuration start from.
    pub directory: Option<PathBuf>,
    /// Time limit of an answer in seconds, after which the process is killed.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// How often an episode is restarted in a new process if the process fails when the episode begins. An answer with
    /// `error` is no failure of the process; it leaves the episode out.
    pub restarts: usize,
    /// Greatest length of a line in bytes.
    #[schemars(range(min = 1))]
    pub max_line_bytes: usize,
}

impl Default for ProcessOptions {
    fn default() -> Self {
        Self { command: Vec::new(), directory: None, timeout: 30.0, restarts: 1, max_line_bytes: 1 << 20 }
    }
}

/// The environment. Its process starts with the first episode, and again after a failure.
pub type Process = RemoteEnvironment<ProcessTransport>;

impl Process {
    /// Creates the environment without starting its process. Fails on options out of range.
    pub fn new(options: ProcessOptions, context: &BuildContext) -> Result<Self> {
        if options.command.first().is_none_or(String::is_empty) {
            let problem = "which program? For example `[python3, my_environment.py]`";
            return Err(Error::config("env.command", problem));
        }
        let timeout = check_seconds("env.timeout", options.timeout)?;
        if options.max_line_bytes == 0 {
            return Err(Error::config("env.max_line_bytes", "expected at least 1, found 0"));
        }
        let directory = options.directory.map_or_else(|| context.base_dir.clone(), |d| context.resolve(d));
        let (restarts, line_bytes) = (options.restarts, options.max_line_bytes);
        let options = ChildOptions { command: options.command, directory, timeout, line_bytes };
        let _descriptors = Descriptors::reserve()?;
        Ok(Self::with_transport(ProcessTransport { options, restarts, child: None, closes: false, _descriptors }))
    }
}

/// The process that plays the episodes.
pub struct ProcessTransport {
    options: ChildOptions,
    restarts: usize,
    child: Option<Child>,
    /// Whether the process asked for a `close` at the end of the current episode.
    closes: bool,
    _descriptors: Descriptors,
}

/// Why a request has no answer.
enum Failure {
    /// The process reports an error of the episode, and can play another.
    Reported(String),
    /// The process is broken, or breaks the protocol.
    Broken(String),
}

impl Failure {
    fn problem(self) -> String {
        match self {
            Self::Reported(problem) | Self::Broken(problem) => problem,
        }
    }
}

impl ProcessTransport {
    /// Sends a request to the process, which is started first unless it runs. A broken process is ended, because its
    /// next line might be the answer to an old request.
    fn ask(&mut self, request: &serde_json::Value) -> std::result::Result<Answer, Failure> {
        let (child, _permit) = match &mut self.child {
            Some(child) => (child, None),
            // The permit is held until the process has answered its first request.
            not_running => {
                let permit = StartPermit::wait();
                (not_running.insert(Child::start(&self.options, &permit).map_err(Failure::Broken)?), Some(permit))
            }
        };
        let answer = child.ask(request.to_string(), self.options.timeout).and_then(|line| Answer::parse(&line));
        match answer {
            Ok(answer) => answer.accepted().map_err(Failure::Reported),
            Err(problem) => {
                self.child = None;
                Err(Failure::Broken(problem))
            }
        }
    }
}

impl Transport for ProcessTransport {
    fn begin(&mut self, start: Start, transcript: &mut Transcript) -> std::result::Result<Observation, String> {
        let mut problem = String::new();
        self.closes = false;
        for attempt in 0..=self.restarts {
            let answer = self.ask(&protocol::reset(start));
            match answer.and_then(|answer| transcript.read_reset(answer).map_err(Failure::Broken)) {
                Ok(observation) => {
                    self.closes = transcript.closes;
                    return Ok(observation);
                }
                Err(Failure::Reported(reported)) => return Err(reported),
                Err(Failure::Broken(found)) => problem = found,
            }
            if attempt < self.restarts {
                warn_once(&format!("the environment process is started again: {problem}"));
                self.child = None;
            }
        }
        Err(problem)
    }

    fn advance(&mut self, action: &str, transcript: &mut Transcript) -> std::result::Result<Transition, String> {
        if self.child.is_none() {
            return Err("a step without an episode".into());
        }
        let answer = self.ask(&protocol::step(action)).map_err(Failure::problem)?;
        transcript.read_step(answer)
    }

    fn end(&mut self) {
        // Only a process that asked for `close` gets it. Another might fail, or its answer might be taken for that to
        // the next request.
        if !std::mem::take(&mut self.closes) {
            return;
        }
        let limit = protocol::CLOSE_TIMEOUT.min(self.options.timeout);
        if let Some(child) = &mut self.child
            && let Err(problem) = child.ask(protocol::close().to_string(), limit)
        {
            warn_once(&format!("an environment process that asked for the end of its episodes: {problem}"));
            self.child = None;
        }
    }

    fn failed(&self, problem: String) -> Error {
        let command = self.options.command.join(" ");
        Error::Unsupported(format!("the environment process `{command}`: {problem}"))
    }
}

roll_core::register! {
    Environment, NAME, ProcessOptions,
    "An environment in a process of its own: JSON lines over stdin and stdout",
    Process::new,
}
