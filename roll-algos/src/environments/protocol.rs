//! Environments that are called in JSON, as a process or a service: one request and one answer per `reset` and `step`.

use roll_core::{Environment, Error, Observation, Transition};
use serde_json::{Value, json};

/// Sends the requests of an environment. Errors of the first two methods are descriptions of the problem.
pub trait Transport: Send {
    /// Begins an episode.
    fn begin(&mut self, seed: u64, transcript: &mut Transcript) -> Result<Observation, String>;
    /// Sends an action of the episode.
    fn advance(&mut self, action: &str, transcript: &mut Transcript) -> Result<Transition, String>;
    /// The error of an episode that ended with `problem`; it names the process or service.
    fn failed(&self, problem: String) -> Error;
}

/// An environment whose episodes a process or a service plays.
pub struct RemoteEnvironment<P> {
    transport: P,
    transcript: Transcript,
}

impl<P: Transport> RemoteEnvironment<P> {
    /// Creates the environment. Nothing is sent before the first episode.
    pub fn over(transport: P) -> Self {
        Self { transport, transcript: Transcript::default() }
    }
}

impl<P: Transport> Environment for RemoteEnvironment<P> {
    fn reset(&mut self, seed: u64) -> roll_core::Result<Observation> {
        self.transport.begin(seed, &mut self.transcript).map_err(|problem| self.transport.failed(problem))
    }

    fn step(&mut self, action: &str) -> roll_core::Result<Transition> {
        self.transport.advance(action, &mut self.transcript).map_err(|problem| self.transport.failed(problem))
    }

    fn instructions(&self) -> String {
        self.transcript.instructions.clone()
    }

    fn solved(&self) -> Option<bool> {
        self.transcript.solved
    }
}

/// The request that begins an episode.
pub fn reset(seed: u64) -> Value {
    json!({ "reset": { "seed": seed } })
}

/// The request with an action.
pub fn step(action: &str) -> Value {
    json!({ "step": { "action": action } })
}

/// An answer to either request.
#[derive(Debug, serde::Deserialize)]
pub struct Answer {
    error: Option<String>,
    observation: Option<String>,
    instructions: Option<String>,
    reward: Option<f64>,
    terminated: Option<bool>,
    #[serde(default)]
    truncated: bool,
    valid: Option<bool>,
    solved: Option<bool>,
}

impl Answer {
    /// Parses an answer. The error quotes it.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|e| format!("its answer {} is not valid: {e}", shortened(text.as_bytes())))
    }

    /// Returns the answer unless it reports an error.
    pub fn accepted(self) -> Result<Self, String> {
        match self.error {
            Some(error) => Err(format!("it reports: {error}")),
            None => Ok(self),
        }
    }
}

/// Facts about the current episode from the latest answers.
#[derive(Debug, Default)]
pub struct Transcript {
    /// Instructions in the answer to `reset`.
    pub instructions: String,
    /// Whether the episode is solved, according to the latest answer.
    pub solved: Option<bool>,
}

impl Transcript {
    /// Reads an answer to `reset`.
    pub fn read_reset(&mut self, answer: Answer) -> Result<Observation, String> {
        let text = answer.observation.ok_or("its answer to `reset` has no `observation`")?;
        self.instructions = answer.instructions.unwrap_or_default();
        self.solved = answer.solved;
        Ok(Observation { text })
    }

    /// Reads an answer to `step`.
    pub fn read_step(&mut self, answer: Answer) -> Result<Transition, String> {
        let missing = |key: &str| format!("its answer to `step` has no `{key}`");
        self.solved = answer.solved;
        Ok(Transition {
            observation: Observation { text: answer.observation.ok_or_else(|| missing("observation"))? },
            reward: answer.reward.ok_or_else(|| missing("reward"))?,
            terminated: answer.terminated.ok_or_else(|| missing("terminated"))?,
            truncated: answer.truncated,
            valid: answer.valid.unwrap_or(true),
        })
    }
}

/// The beginning of an answer, for an error message.
pub fn shortened(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(&line[..line.len().min(200)]);
    match line.len() {
        0..=200 => format!("`{text}`"),
        n => format!("`{text}...` ({n} bytes)"),
    }
}
