//! A reward that is a program of its own, in any language.
//!
//! The program is started once and answers frames ([`frame`]) on its standard input with frames on its standard output;
//! its standard error goes to the log. `examples/reward_command/brightness.py` is a whole one. The calls, by `call` of
//! the header:
//!
//! | call      | header              | tensors              | answer                                                   |
//! |-----------|---------------------|----------------------|----------------------------------------------------------|
//! | `hello`   | `version`, `options`|                      | `name`, `differentiable`                                 |
//! | `prepare` | `fps`               | `frames`             | the target's tensors                                     |
//! | `score`   | `fps`, `prompt`, `record` | `frames`, and the target's as `target/NAME` | `score` (a number, or null with `reason`), `details`, and with `record` the tensor `gradient` of the score in the frames |
//!
//! Frames are f32 `[T, 3, H, W]` in [-1, 1]. An answer with `error` is an error. The score is a scalar, so one gradient
//! is the whole pullback: nothing is kept in the program between calls, and a program that died is started again and
//! asked again.

mod child;
pub mod frame;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use roll_core::registry::{default_options, parse_options};
use roll_core::{
    Error, Factory, Fault, Grad, OnMissing, Options, Pullback, Registration, Result, RewardScorer, Score, Target,
    Tensor, Video,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use child::{ChildError, Message, Running};

/// Version of the calls.
const VERSION: u32 = 1;

/// Options of the reward `command`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Seconds that a call may take.
    pub timeout: f64,
    /// Seconds that the program may take to start and say hello: it may load a model.
    pub start_timeout: f64,
    /// How often the program is started again for one call, after it died or gave no answer in time.
    pub restarts: u32,
    /// Handed to the program with `hello`.
    pub options: Options,
    /// What to do with a sample that has nothing to score.
    pub on_missing: OnMissing,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            timeout: 60.0,
            start_timeout: 300.0,
            restarts: 1,
            options: Options::new(),
            on_missing: OnMissing::Skip,
        }
    }
}

/// What can go wrong with the program.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// No answer, although it was started again as often as allowed.
    #[error("the reward command `{command}` gave no answer to `{call}` (started {starts} times for it)")]
    NoAnswer {
        /// The program and its arguments.
        command: String,
        /// The call.
        call: &'static str,
        /// How often it was started for this call.
        starts: u32,
        /// What happened the last time.
        #[source]
        source: ChildError,
    },
    /// It answered with an error.
    #[error("the reward command `{command}` failed in `{call}`: {problem}")]
    Failed {
        /// The program and its arguments.
        command: String,
        /// The call.
        call: &'static str,
        /// What it said.
        problem: String,
    },
    /// It answered something that makes no sense.
    #[error("the reward command `{command}` answered `{call}` wrongly: {problem}")]
    Nonsense {
        /// The program and its arguments.
        command: String,
        /// The call.
        call: &'static str,
        /// What was expected and what was found.
        problem: String,
    },
}

/// A scorer that asks a program.
pub struct CommandReward {
    config: Config,
    directory: PathBuf,
    /// `None` after it died.
    running: Option<Running>,
    name: String,
    differentiable: bool,
}

impl CommandReward {
    /// Starts the program, in `directory`.
    pub fn new(config: Config, directory: PathBuf) -> Result<Self> {
        if config.command.is_empty() {
            let problem = "missing: the program and its arguments, as a list of texts";
            return Err(Error::config("reward.command", problem));
        }
        for (key, value) in [("timeout", config.timeout), ("start_timeout", config.start_timeout)] {
            // Beyond a year it is no limit, and `Duration` has one of its own.
            if !(value > 0.0 && value < 3.2e7) {
                return Err(Error::config(format!("reward.{key}"), format!("expected seconds above 0, found {value}")));
            }
        }
        let name = "command".to_string();
        let mut reward = Self { config, directory, running: None, name, differentiable: false };
        let (hello, _) = reward.hello().map_err(|source| reward.no_answer("hello", 1, source))?;
        let hello = reward.accept("hello", hello)?;
        if let Some(name) = hello.get("name").and_then(Json::as_str) {
            reward.name = name.into();
        }
        reward.differentiable = hello.get("differentiable").and_then(Json::as_bool).unwrap_or(false);
        Ok(reward)
    }

    fn command(&self) -> String {
        self.config.command.join(" ")
    }

    fn no_answer(&self, call: &'static str, starts: u32, source: ChildError) -> Error {
        let fault = if matches!(source, ChildError::Start(_)) { Fault::User } else { Fault::Failure };
        Error::component(fault, CommandError::NoAnswer { command: self.command(), call, starts, source })
    }

    fn nonsense(&self, call: &'static str, problem: String) -> Error {
        Error::component(Fault::Failure, CommandError::Nonsense { command: self.command(), call, problem })
    }

    /// Starts the program and says hello.
    fn hello(&mut self) -> std::result::Result<Message, ChildError> {
        let mut running = Running::start(&self.config.command, &self.directory)?;
        let header = json!({ "call": "hello", "version": VERSION, "options": self.config.options });
        let answer = running.ask((header, Vec::new()), Duration::from_secs_f64(self.config.start_timeout))?;
        self.running = Some(running);
        Ok(answer)
    }

    fn once(&mut self, header: &Json, tensors: &[(String, Tensor)]) -> std::result::Result<Message, ChildError> {
        if self.running.is_none() {
            self.hello()?;
        }
        // `hello` has put it there.
        let Some(mut running) = self.running.take() else {
            return Err(ChildError::Broken { how: "it is not running".into(), said: String::new() });
        };
        let limit = Duration::from_secs_f64(self.config.timeout);
        let answer = running.ask((header.clone(), tensors.to_vec()), limit)?;
        self.running = Some(running);
        Ok(answer)
    }

    /// Asks; starts the program again when it died or hung.
    fn ask(&mut self, call: &'static str, header: &Json, tensors: &[(String, Tensor)]) -> Result<Message> {
        let mut starts = 0;
        loop {
            match self.once(header, tensors) {
                Ok((answer, tensors)) => return Ok((self.accept(call, answer)?, tensors)),
                Err(problem) if starts < self.config.restarts => {
                    starts += 1;
                    tracing::warn!("the reward command `{}`: {problem}; starting it again", self.command());
                }
                Err(problem) => return Err(self.no_answer(call, starts, problem)),
            }
        }
    }

    /// An answer that is no error.
    fn accept(&self, call: &'static str, answer: Json) -> Result<Json> {
        match answer.get("error") {
            None | Some(Json::Null) => Ok(answer),
            Some(problem) => {
                let problem = problem.as_str().map_or_else(|| problem.to_string(), String::from);
                Err(Error::component(Fault::Failure, CommandError::Failed { command: self.command(), call, problem }))
            }
        }
    }

    /// The gradient of an answer, of the shape of the frames.
    fn gradient(&self, tensors: Vec<(String, Tensor)>, frames: &Tensor) -> Result<Pullback> {
        let gradient = tensors.into_iter().find(|(name, _)| name == "gradient").map(|(_, tensor)| tensor);
        let gradient =
            gradient.ok_or_else(|| self.nonsense("score", "a gradient was asked for, and none came".into()))?;
        if gradient.shape() != frames.shape() || gradient.f32s().is_err() {
            let problem = format!("expected a gradient of f32 {:?}, found {gradient:?}", frames.shape());
            return Err(self.nonsense("score", problem));
        }
        Ok(Pullback::new(move |cotangent| {
            let scale = cotangent.item()?;
            Tensor::new(gradient.f32s()?.iter().map(|g| scale * g).collect::<Vec<f32>>(), gradient.shape())
        }))
    }
}

impl RewardScorer for CommandReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn differentiable(&self) -> bool {
        self.differentiable
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        let header = json!({ "call": "prepare", "fps": reference.fps() });
        let (_, tensors) = self.ask("prepare", &header, &[("frames".into(), reference.frames().clone())])?;
        Ok(Target { tensors: tensors.into_iter().collect() })
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let record = grad.is_on() && self.differentiable;
        let header = json!({ "call": "score", "fps": video.fps(), "prompt": prompt, "record": record });
        let mut tensors = vec![("frames".to_string(), video.frames().clone())];
        tensors.extend(target.tensors.iter().map(|(name, tensor)| (format!("target/{name}"), tensor.clone())));
        let (answer, tensors) = self.ask("score", &header, &tensors)?;
        match answer.get("score") {
            Some(Json::Null) => {
                let reason = answer.get("reason").and_then(Json::as_str).unwrap_or("it gave no reason");
                Ok((Score::Missing { reason: reason.into() }, None))
            }
            Some(score) => {
                let value = score.as_f64().ok_or_else(|| {
                    self.nonsense("score", format!("expected a number or null as `score`, found {score}"))
                })?;
                let details = answer.get("details").and_then(Json::as_object).into_iter().flatten();
                let details: BTreeMap<String, f64> =
                    details.filter_map(|(k, v)| Some((k.clone(), v.as_f64()?))).collect();
                let pullback = if record { Some(self.gradient(tensors, video.frames())?) } else { None };
                Ok((Score::Value { value, details }, pullback))
            }
            None => Err(self.nonsense("score", "it holds no `score`".into())),
        }
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

roll_core::inventory::submit! {
    Registration {
        name: "command",
        summary: "A reward that is a program of its own, in any language",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<Config>,
        factory: Factory::Reward(|options, context| {
            let config = parse_options("reward", options)?;
            Ok(Box::new(CommandReward::new(config, context.base_dir.clone())?))
        }),
    }
}

#[cfg(all(test, unix))]
mod tests;
