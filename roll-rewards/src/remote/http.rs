//! The reward `http`: a service that answers frames sent by POST.
//!
//! The body of request and answer is one frame ([`super::frame`]) of type `application/octet-stream`. Every header
//! contains the options, so that a service needs no state per client. A busy service answers 429 or 503, optionally
//! with `Retry-After` in seconds, and the run waits. `examples/reward_http/brightness.py` is a complete example.
//!
//! Protection against a faulty service: the tensors of an answer have at most 64 MiB more than those of the request, a
//! request including its answer ends within `timeout`, and redirects are not followed, so frames and token are sent to
//! `url` only.

use std::io::BufReader;
use std::time::Instant;

use roll_core::{Error, Fault, OnMissing, Options, Result, Tensor, check_seconds};
use roll_external::service::{NoAnswer, PAUSE, Service, ServiceOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::{Message, RemoteReward, Transport, VERSION, frame};

/// Options of the reward `http`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HttpConfig {
    /// Address of the service, `http://...` or `https://...`. Certificates are verified with Mozilla's certificate
    /// authorities; a service with another certificate needs a proxy.
    pub url: String,
    /// Environment variable with the service's token, which is sent as `Authorization: Bearer`. Default: no token. The
    /// token itself is not part of the configuration, because runs store their configuration.
    pub token_env: Option<String>,
    /// Time limit of a request in seconds.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Time limit in seconds for a service to start listening.
    pub start_timeout: f64,
    /// How often a call is repeated after a failed connection or a 5xx answer.
    pub retries: u32,
    /// Time in seconds after which a call to a busy service (429 or 503) fails.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub busy_timeout: f64,
    /// Sent with every call.
    pub options: Options,
    /// What happens with a sample that has nothing to score.
    pub on_missing: OnMissing,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            url: String::new(),
            token_env: None,
            timeout: 60.0,
            start_timeout: 30.0,
            retries: 2,
            busy_timeout: 600.0,
            options: Options::new(),
            on_missing: OnMissing::Skip,
        }
    }
}

/// The service did not answer.
#[derive(Debug, thiserror::Error)]
#[error("the reward service {url} did not answer `{call}` (asked {}): {problem}", super::times(.times))]
struct Unanswered {
    url: String,
    call: &'static str,
    times: u32,
    problem: String,
}

/// A service that scores.
pub struct ScoringService {
    config: HttpConfig,
    service: Service,
}

impl ScoringService {
    /// Creates the client of the service of `config`; sends nothing.
    pub fn new(config: HttpConfig) -> Result<Self> {
        let service = Service::new(ServiceOptions {
            section: "reward",
            url: &config.url,
            token_env: config.token_env.as_deref(),
            timeout: config.timeout,
            keeps_connections: true,
        })?;
        check_seconds("reward.busy_timeout", config.busy_timeout)?;
        check_seconds("reward.start_timeout", config.start_timeout)?;
        Ok(Self { config, service })
    }

    /// Sends `body`. The tensors of the answer may have `max_bytes` bytes.
    fn try_call(&self, body: &[u8], max_bytes: usize) -> std::result::Result<Message, NoAnswer> {
        let answer = self.service.post("application/octet-stream", body)?;
        frame::read::<Json>(&mut BufReader::new(answer), max_bytes).map_err(|error| match error {
            frame::FrameError::NotAFrame(problem) => NoAnswer::Permanent(problem),
            frame::FrameError::Io(error) => NoAnswer::Failed(format!("the answer was cut off: {error}")),
        })
    }
}

impl Transport for ScoringService {
    fn peer(&self) -> String {
        format!("the reward service {}", self.config.url)
    }

    fn hello(&mut self) -> Result<Message> {
        self.ask("hello", json!({ "call": "hello", "version": VERSION }), &[])
    }

    fn ask(&mut self, call: &'static str, mut header: Json, tensors: &[(String, Tensor)]) -> Result<Message> {
        header["options"] = serde_json::to_value(&self.config.options)
            .map_err(|e| Error::config("reward.options", format!("cannot be sent: {e}")))?;
        let mut body = Vec::new();
        frame::write(&mut body, &header, tensors)
            .map_err(|e| Error::Misuse(format!("a frame for {} could not be made: {e}", self.peer())))?;
        let max_bytes = frame::answer_bytes(tensors);
        let (begun, mut times, mut failures) = (Instant::now(), 0, 0);
        let problem = loop {
            times += 1;
            match self.try_call(&body, max_bytes) {
                Ok(answer) => return Ok(answer),
                Err(NoAnswer::Busy(wait)) => {
                    if (begun.elapsed() + wait).as_secs_f64() > self.config.busy_timeout {
                        break format!("it was busy for {} s", self.config.busy_timeout);
                    }
                    std::thread::sleep(wait);
                }
                Err(NoAnswer::ConnectionRefused(problem))
                    if call == "hello" && begun.elapsed().as_secs_f64() < self.config.start_timeout =>
                {
                    if times == 1 {
                        tracing::info!("{}: {problem}; waiting until it listens", self.peer());
                    }
                    std::thread::sleep(PAUSE);
                }
                Err(NoAnswer::Failed(problem) | NoAnswer::ConnectionRefused(problem))
                    if failures < self.config.retries =>
                {
                    failures += 1;
                    tracing::warn!("{}: {problem}; asking again", self.peer());
                    std::thread::sleep(PAUSE);
                }
                Err(
                    NoAnswer::Failed(problem)
                    | NoAnswer::ConnectionRefused(problem)
                    | NoAnswer::Rejected(problem)
                    | NoAnswer::Permanent(problem),
                ) => break problem,
            }
        };
        Err(Error::component(Fault::Failure, Unanswered { url: self.config.url.clone(), call, times, problem }))
    }
}

roll_core::register! {
    Reward, "http", HttpConfig,
    "A reward that is a service, asked over HTTP",
    |config: HttpConfig, _| {
        let on_missing = config.on_missing;
        RemoteReward::new("http", ScoringService::new(config)?, on_missing)
    },
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
