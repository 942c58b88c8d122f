//! The reward `http`: a service that answers messages sent by POST.
//!
//! The body of a request or an answer is one message, encoded as in [`super::frame`], of type
//! `application/octet-stream`. Every header contains the options, so that a service needs no state per client. A busy
//! service answers 429 or 503, optionally with `Retry-After` in seconds, and the run waits.
//! `examples/reward_http/brightness.py` is a complete example.
//!
//! Protection against a faulty service: the tensors of an answer have at most 64 MiB more than the tensors of the
//! request, a request including its answer ends within `timeout`, and redirects are not followed, so that videos and
//! token are sent to `url` only.

use std::io::BufReader;

use roll_core::{Error, Fault, OnMissing, Options, Result, Tensor};
use roll_external::service::{IDLE_LIMIT, NoAnswer, Repeats, Service, ServiceOptions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::{Message, OnError, RemoteReward, Transport, VERSION, frame};
use crate::picture::Frames;

/// Whether the service may receive a request twice. It may, because no state is kept between calls.
const MAY_RECEIVE_TWICE: bool = true;

/// Options of the reward `http`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HttpConfig {
    /// Address of the service, `http://...` or `https://...`. Certificates are verified with Mozilla's certificate
    /// authorities; a service with another certificate needs a proxy.
    #[schemars(extend("x-required" = true))]
    pub url: String,
    /// Environment variable with the service's token, which is sent as `Authorization: Bearer`. If absent, no token is
    /// sent. The token itself is not part of the configuration, because runs store their configuration.
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
    /// Options of the service itself, which it receives with every call.
    pub options: Options,
    /// Which frames of a video are sent.
    pub frames: Frames,
    /// What happens with a sample that has nothing to score, or whose score is not finite.
    pub on_missing: OnMissing,
    /// What happens if the service answers with an error, such as an exception on one clip: `stop` ends the run; `skip`
    /// logs a warning and treats the clip as one with nothing to score (`on_missing`).
    pub on_error: OnError,
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
            frames: Frames::All,
            on_missing: OnMissing::Skip,
            on_error: OnError::Stop,
        }
    }
}

/// The transport to a service that scores.
pub struct ScoringService {
    config: HttpConfig,
    service: Service,
    repeats: Repeats,
}

impl ScoringService {
    /// Creates the client of the service in `config` without sending anything.
    pub fn new(config: HttpConfig) -> Result<Self> {
        let service = Service::new(ServiceOptions {
            section: "reward",
            url: &config.url,
            token_env: config.token_env.as_deref(),
            timeout: config.timeout,
            keeps_connections: Some(IDLE_LIMIT),
        })?;
        let repeats = Repeats::new("reward", config.retries, config.busy_timeout, Some(config.start_timeout))?;
        Ok(Self { config, service, repeats })
    }

    /// Sends `body` once. The tensors of the answer may have `max_bytes` bytes.
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
        let peer = format!("{} to `{call}`", self.peer());
        let answer = self.repeats.ask(&peer, MAY_RECEIVE_TWICE, || self.try_call(&body, max_bytes));
        answer.map_err(|reason| Error::component(Fault::Failure, reason))
    }
}

roll_core::register! {
    Reward, "http", HttpConfig,
    "A reward that is a service, asked over HTTP",
    |config: HttpConfig, _| {
        let (frames, on_missing, on_error) = (config.frames, config.on_missing, config.on_error);
        let transport = ScoringService::new(config)?;
        Ok(RemoteReward::new("http", transport, frames, on_missing)?.with_on_error(on_error))
    },
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
