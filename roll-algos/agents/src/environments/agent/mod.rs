//! An environment that is an agent's program as it is: it plays an episode by itself, asks this program for completions
//! instead of a service, and reports a reward at its end.
//!
//! The program is started for each episode, with three environment variables:
//!
//! | variable | meaning |
//! |---|---|
//! | `OPENAI_BASE_URL` | address of the endpoint (`endpoint.rs`) |
//! | `OPENAI_API_KEY` | key of the episode |
//! | `ROLL_EPISODE` | `{"seed": 7, "split": "train", "number": 12}`, as the environment `process` gets it |
//!
//! A request is the prompt of a turn, and the completion is the agent's answer. The last line of its standard output
//! that is a JSON object with `reward` ends the episode: `{"reward": 1.0, "solved": true}`.

mod chat;
mod endpoint;
mod program;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use roll_core::{
    BuildContext, ChatRequest, Environment, Error, Observation, PICTURE_MARK, Result, Split, Transition, check_seconds,
};
use serde_json::json;

use super::process::limits::{Descriptors, StartPermit};
use super::protocol::seed_on_the_wire;
use chat::Dialogue;
use endpoint::Call;
use program::{Event, Program, Report};

const NAME: &str = "agent";

/// Options of the environment `agent`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AgentOptions {
    /// Program and arguments, started for each episode.
    #[schemars(extend("x-required" = true))]
    pub command: Vec<String>,
    /// Working directory. `null`: the directory that relative paths of the configuration start from.
    pub directory: Option<PathBuf>,
    /// Longest time in seconds from the program's start, or from an answer, to its next request or its end. Then it is
    /// killed, with all programs that it started.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self { command: Vec::new(), directory: None, timeout: 600.0 }
    }
}

/// The environment.
pub struct Agent {
    command: Vec<String>,
    directory: PathBuf,
    timeout: Duration,
    split: Split,
    number: u64,
    /// The running program.
    program: Option<Program>,
    /// The request that waits for the model's answer.
    call: Option<Call>,
    /// The same request, as the model reads it.
    chat: Option<ChatRequest>,
    dialogue: Dialogue,
    solved: Option<bool>,
    /// Number of answers in the episode.
    answers: u64,
    _descriptors: Descriptors,
}

impl Agent {
    /// Creates the environment; no program is started. Fails on options out of range.
    pub fn new(options: AgentOptions, context: &BuildContext) -> Result<Self> {
        if options.command.first().is_none_or(String::is_empty) {
            return Err(Error::config("env.command", "which program? For example `[python3, my_agent.py]`"));
        }
        Ok(Self {
            timeout: check_seconds("env.timeout", options.timeout)?,
            directory: options.directory.map_or_else(|| context.base_dir.clone(), |d| context.resolve(d)),
            command: options.command,
            split: Split::default(),
            number: 0,
            program: None,
            call: None,
            chat: None,
            dialogue: Dialogue::default(),
            solved: None,
            answers: 0,
            _descriptors: Descriptors::reserve()?,
        })
    }

    /// Waits for the next request of the program, or for its end with its report.
    fn next(&mut self) -> Result<Option<Report>> {
        loop {
            let program = self.program.as_mut().ok_or_else(|| Error::Misuse("a step without an episode".into()))?;
            let event = program.next(self.timeout).map_err(|problem| failed(&self.command, &problem));
            match event {
                Ok(Event::Asks(call)) => match self.dialogue.read(&call.request) {
                    Ok(chat) => {
                        (self.call, self.chat) = (Some(call), Some(chat));
                        return Ok(None);
                    }
                    // The program reads why, and may go on with another request.
                    Err(problem) => call.refuse(&problem),
                },
                Ok(Event::Ended(report)) => {
                    (self.program, self.call) = (None, None);
                    return Ok(Some(report));
                }
                Err(error) => {
                    (self.program, self.call) = (None, None);
                    return Err(error);
                }
            }
        }
    }

    /// The end of the conversation that the model reads, for records.
    fn observation(&self) -> Observation {
        let Some(ChatRequest { messages, pictures, .. }) = &self.chat else { return Observation::default() };
        let last = messages.last().map(|message| message.content.clone()).unwrap_or_default();
        let earlier = pictures.len().saturating_sub(last.matches(PICTURE_MARK).count());
        Observation::with_pictures(last, pictures[earlier..].to_vec())
    }
}

fn failed(command: &[String], problem: &str) -> Error {
    Error::Unsupported(format!("the agent's program `{}`: {problem}", command.join(" ")))
}

impl Environment for Agent {
    fn enter(&mut self, split: Split, number: u64) -> Result<()> {
        (self.split, self.number) = (split, number);
        Ok(())
    }

    fn leave(&mut self) -> Result<()> {
        // A program whose episode is over before it has ended is killed.
        (self.program, self.call) = (None, None);
        Ok(())
    }

    fn reset(&mut self, seed: u64) -> Result<Observation> {
        (self.program, self.call, self.chat) = (None, None, None);
        (self.dialogue, self.solved, self.answers) = (Dialogue::default(), None, 0);
        let episode = json!({ "seed": seed_on_the_wire(seed), "split": self.split.name(), "number": self.number });
        // Held until the program asks the model for the first time.
        let _permit = StartPermit::wait();
        let started = Program::start(&self.command, &self.directory, &episode.to_string());
        self.program = Some(started.map_err(|problem| failed(&self.command, &problem))?);
        match self.next()? {
            None => Ok(self.observation()),
            Some(_) => Err(failed(&self.command, "it ended without asking the model")),
        }
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        let call = self.call.take().ok_or_else(|| Error::Misuse("a step without an episode".into()))?;
        let completion = self.dialogue.answer(&call.request, action, self.answers);
        self.answers += 1;
        call.complete(completion);
        let report = self.next()?;
        let is_over = report.is_some();
        let Report { reward, solved } = report.unwrap_or_default();
        self.solved = solved;
        let observation = if is_over { Observation::default() } else { self.observation() };
        Ok(Transition { observation, reward, terminated: is_over, truncated: false, valid: true })
    }

    fn solved(&self) -> Option<bool> {
        self.solved
    }

    fn chat(&self) -> Option<ChatRequest> {
        self.chat.clone()
    }
}

roll_core::register! {
    Environment, NAME, AgentOptions,
    "An agent's program as it is: it asks an OpenAI-compatible endpoint, and reports a reward at its end",
    Agent::new,
}
