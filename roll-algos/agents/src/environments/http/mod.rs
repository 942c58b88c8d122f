//! An environment that is a service: the JSON messages described in [`super::process`], with one POST per `reset` and
//! `step`.
//!
//! ```text
//! -> {"session": "9f...", "turn": 0, "reset": {"seed": 7, "split": "train", "number": 12}}
//! <- {"observation": "..."}
//! -> {"session": "9f...", "turn": 1, "step": {"action": "<answer>Left</answer>"}}
//! <- {"observation": "...", "reward": 0.5, "terminated": false}
//! -> {"session": "9f...", "turn": 1, "close": true}
//! ```
//!
//! A service can play many episodes at the same time: `session` identifies the environment, and a `reset` ends the
//! session's episode and begins the next. `close` says that the episode is over, even if the service ended it itself,
//! so that the service can release what it holds for the episode. `close` is sent once, and its answer is waited for at
//! most two seconds and ignored, so that a service need not know the request.
//!
//! A connection is used again for at most 1.5 s after its last answer, because services close idle connections after 2
//! s or more. If a service closed a connection while a request arrives, it would be unknown whether the action
//! happened.
//!
//! A request is repeated only if no action can happen twice:
//!
//! - The answers 429 and 503 mean that the service has done nothing with the request. It is repeated for at most
//!   `busy_timeout`.
//! - A `reset` is repeated after a failure of the connection or a 5xx answer other than 503, a `step` only if the
//!   connection was refused; both at most `retries` times.
//!
//! Protection against a faulty service: an answer has at most `max_answer_bytes` bytes, a request including its answer
//! ends within `timeout`, and redirects are not followed, so actions and token are sent to `url` only.

#[cfg(test)]
mod tests;

use std::io::Read;
use std::time::Duration;

use roll_core::{Error, Observation, Result, Transition};
use roll_external::service::{NoAnswer, Repeats, Service, ServiceOptions};
use serde_json::Value;

use super::protocol::{self, Answer, CLOSE_TIMEOUT, RemoteEnvironment, Start, Transcript, Transport};

const NAME: &str = "http";
/// Longest time that a connection may be idle and still be used again. Servers close connections that are idle for 2 s
/// (gunicorn), 5 s (uvicorn, Node.js) or longer.
const IDLE_LIMIT: Duration = Duration::from_millis(1500);

/// Options of the environment `http`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HttpOptions {
    /// Address of the service, `http://...` or `https://...`. Certificates are verified with Mozilla's certificate
    /// authorities; a service with another certificate needs a proxy.
    #[schemars(extend("x-required" = true))]
    pub url: String,
    /// Environment variable with the service's token, which is sent as `Authorization: Bearer`. Default: no token. The
    /// token itself is not part of the configuration, because runs store their configuration.
    pub token_env: Option<String>,
    /// Time limit of a request in seconds.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Maximum number of repetitions of a failed request. A `reset` is repeated after a failure of the connection or a
    /// 5xx answer, a `step` only if the connection was refused: no action happens twice.
    pub retries: u32,
    /// Time in seconds for which a request to a busy service (429 or 503) is repeated before the episode fails.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub busy_timeout: f64,
    /// Greatest length of an answer in bytes.
    #[schemars(range(min = 1))]
    pub max_answer_bytes: usize,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            url: String::new(),
            token_env: None,
            timeout: 30.0,
            retries: 2,
            busy_timeout: 600.0,
            max_answer_bytes: 1 << 20,
        }
    }
}

/// The environment. Nothing is sent before the first episode.
pub type Http = RemoteEnvironment<HttpTransport>;

impl Http {
    /// Creates the environment. Fails on options out of range.
    pub fn new(options: HttpOptions) -> Result<Self> {
        let service = Service::new(ServiceOptions {
            section: "env",
            url: &options.url,
            token_env: options.token_env.as_deref(),
            timeout: options.timeout,
            keeps_connections: Some(IDLE_LIMIT),
        })?;
        // Without `start_timeout`, a service that does not listen has failed.
        let repeats = Repeats::new("env", options.retries, options.busy_timeout, None)?;
        if options.max_answer_bytes == 0 {
            return Err(Error::config("env.max_answer_bytes", "expected at least 1, found 0"));
        }
        // Not derived from the run's seed: it must differ between the environments of all ranks and runs, and no result
        // depends on it.
        let session = format!("{:016x}", rand::random::<u64>());
        Ok(Self::with_transport(HttpTransport { options, service, repeats, session, turn: None, begun: None }))
    }
}

/// The service that plays the episodes.
pub struct HttpTransport {
    options: HttpOptions,
    service: Service,
    repeats: Repeats,
    session: String,
    /// Number of answered steps of the episode; `None` without an episode or after a failed step.
    turn: Option<u64>,
    /// Turn of the latest request of the episode, answered or not; `None` before the first episode and after `close`.
    begun: Option<u64>,
}

impl HttpTransport {
    /// Sends the request until there is an answer or the limits of repetitions are reached. Fails also if the answer
    /// reports an error. `may_receive_twice`: whether the service may get the request again if it may have acted on it.
    fn ask(&self, mut request: Value, turn: u64, may_receive_twice: bool) -> std::result::Result<Answer, String> {
        request["session"] = self.session.as_str().into();
        request["turn"] = turn.into();
        let body = request.to_string();
        let answer = self.repeats.ask(&self.options.url, may_receive_twice, || self.once(&body, None));
        answer.map_err(|reason| reason.problem)?.accepted()
    }

    /// Sends a request once; `limit` bounds the time further than the option `timeout`.
    fn once(&self, body: &str, limit: Option<Duration>) -> std::result::Result<Answer, NoAnswer> {
        let answer = self.service.post_within(limit, "application/json", body.as_bytes())?;
        let (limit, mut body) = (self.options.max_answer_bytes, Vec::new());
        // One byte more than allowed, to distinguish an answer that is too long from one that just fits.
        let read = answer.take(limit as u64 + 1).read_to_end(&mut body);
        if read.is_err() {
            return Err(NoAnswer::Failed("its answer was cut off".into()));
        }
        if body.len() > limit {
            let problem = format!("its answer has more than {limit} bytes (`env.max_answer_bytes`)");
            return Err(NoAnswer::Permanent(problem));
        }
        let text = String::from_utf8(body).map_err(|e| {
            NoAnswer::Permanent(format!("its answer is not UTF-8: {}", protocol::shortened(e.as_bytes())))
        })?;
        Answer::parse(&text).map_err(NoAnswer::Permanent)
    }
}

impl Transport for HttpTransport {
    fn begin(&mut self, start: Start, transcript: &mut Transcript) -> std::result::Result<Observation, String> {
        (self.turn, self.begun) = (None, Some(0));
        let may_receive_twice = true;
        let observation = transcript.read_reset(self.ask(protocol::reset(start), 0, may_receive_twice)?)?;
        self.turn = Some(0);
        Ok(observation)
    }

    fn advance(&mut self, action: &str, transcript: &mut Transcript) -> std::result::Result<Transition, String> {
        // Whether the action happened is unknown until the answer arrives.
        let turn = self.turn.take().ok_or("a step without an episode")? + 1;
        self.begun = Some(turn);
        let may_receive_twice = false;
        let advanced = transcript.read_step(self.ask(protocol::step(action), turn, may_receive_twice)?)?;
        self.turn = Some(turn);
        Ok(advanced)
    }

    fn end(&mut self) {
        let Some(turn) = self.begun.take() else { return };
        self.turn = None;
        let mut request = protocol::close();
        (request["session"], request["turn"]) = (self.session.as_str().into(), turn.into());
        if self.once(&request.to_string(), Some(CLOSE_TIMEOUT)).is_err() {
            tracing::debug!("{} gave no answer to the end of an episode", self.options.url);
        }
    }

    fn failed(&self, problem: String) -> Error {
        Error::Unsupported(format!("the environment service {}: {problem}", self.options.url))
    }
}

roll_core::register! {
    Environment, NAME, HttpOptions,
    "An environment that is a service, asked over HTTP",
    |options, _| Http::new(options),
}
