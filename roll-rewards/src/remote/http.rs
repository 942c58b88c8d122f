//! The reward `http`: a service that answers frames sent by POST.
//!
//! Body of request and answer is one frame ([`super::frame`]), of type `application/octet-stream`. Every header carries
//! the options, so that a service need not remember whom it serves. A service that is busy says so with 429 or 503 and,
//! if it likes, `Retry-After` in seconds: the run waits for it. `examples/reward_http/brightness.py` is a whole one.
//!
//! What keeps a service from doing harm: an answer has at most as many bytes of tensors as the question and 64 MiB, a
//! request with its answer ends within `timeout`, and no redirect is followed: frames and token go to `url` alone.

use std::io::{BufReader, Read};
use std::time::{Duration, Instant};

use roll_core::registry::{default_options, parse_options};
use roll_core::{Error, Factory, Fault, OnMissing, Options, Registration, Result, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::{Message, RemoteReward, Transport, VERSION, frame};

/// How long to wait before asking again, when the service does not say.
const PAUSE: Duration = Duration::from_millis(500);
/// How long at least, whatever it says.
const LEAST_PAUSE: Duration = Duration::from_millis(20);
/// Characters of an answer that is none which an error repeats.
const QUOTED: usize = 300;

/// Options of the reward `http`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address of the service, `http://...` or `https://...`. A certificate is checked against the authorities that
    /// Mozilla trusts; for one of your own put a proxy before the service.
    pub url: String,
    /// Environment variable that holds the service's token, sent as `Authorization: Bearer`; none unless given. The
    /// token itself stands in no configuration, which runs keep.
    pub token_env: Option<String>,
    /// Seconds that a request may take.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Seconds that a service that was just started may take until it listens.
    pub start_timeout: f64,
    /// How often a call is repeated after the connection failed or the service answered 5xx.
    pub retries: u32,
    /// Seconds that a service may be busy (429 or 503) before the call is given up.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub busy_timeout: f64,
    /// Sent with every call.
    pub options: Options,
    /// Reaction to a sample with nothing to score.
    pub on_missing: OnMissing,
}

impl Default for Config {
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

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[error("the reward service {url} gave no answer to `{call}` (asked {}): {problem}", super::times(.times))]
struct NoAnswer {
    url: String,
    call: &'static str,
    times: u32,
    problem: String,
}

/// What a request came to.
enum Outcome {
    Answer(Message),
    /// Ask again after a while.
    Busy(Duration),
    /// Nobody listens at the address.
    Absent(String),
    /// May go better the next time.
    Failed(String),
    /// Will not go better.
    Refused(String),
}

/// A service that is asked.
pub struct Service {
    config: Config,
    agent: ureq::Agent,
    /// The header `Authorization`.
    authorization: Option<String>,
}

impl Service {
    /// The service of `config`; asks nothing yet.
    pub fn new(config: Config) -> Result<Self> {
        let expected = || {
            let problem =
                format!("expected an address such as http://host:8000/score or https://..., found `{}`", config.url);
            Error::config("reward.url", problem)
        };
        let uri: ureq::http::Uri = config.url.parse().map_err(|_| expected())?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
            return Err(expected());
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            let problem = "an address with a password would stand in the run's config.yaml; put the service's token into an \
                           environment variable and name it in `reward.token_env`";
            return Err(Error::config("reward.url", problem));
        }
        super::check_seconds("reward.timeout", config.timeout)?;
        super::check_seconds("reward.busy_timeout", config.busy_timeout)?;
        super::check_seconds("reward.start_timeout", config.start_timeout)?;
        let authorization = match &config.token_env {
            Some(name) => match std::env::var(name) {
                Ok(token) if !token.is_empty() => Some(format!("Bearer {token}")),
                _ => {
                    let problem = format!("the environment variable `{name}` holds no token");
                    return Err(Error::config("reward.token_env", problem));
                }
            },
            None => None,
        };
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(Duration::from_secs_f64(config.timeout)))
            // Answers of any status are looked at here.
            .http_status_as_error(false)
            .max_redirects(0)
            .build()
            .into();
        Ok(Self { config, agent, authorization })
    }

    /// Sends `body`; the tensors of the answer may have `most` bytes.
    fn once(&self, body: &[u8], most: usize) -> Outcome {
        let mut request = self.agent.post(&self.config.url).header("Content-Type", "application/octet-stream");
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        let mut response = match request.send(body) {
            Ok(response) => response,
            Err(ureq::Error::Io(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                return Outcome::Absent(error.to_string());
            }
            Err(error) => return Outcome::Failed(error.to_string()),
        };
        let status = response.status().as_u16();
        let wait = response.headers().get("Retry-After").and_then(|v| v.to_str().ok()?.trim().parse::<f64>().ok());
        let location = response.headers().get("Location").map(|to| String::from_utf8_lossy(to.as_bytes()).into_owned());
        let mut reader = response.body_mut().as_reader();
        match status {
            200 => match frame::read::<Json>(&mut BufReader::new(&mut reader), most) {
                Ok(answer) => Outcome::Answer(answer),
                Err(frame::FrameError::NoFrame(problem)) => Outcome::Refused(problem),
                Err(frame::FrameError::Io(error)) => Outcome::Failed(format!("the answer was cut off: {error}")),
            },
            429 | 503 => {
                let wait = wait.filter(|s| (0.0..3600.0).contains(s)).map(Duration::from_secs_f64);
                Outcome::Busy(wait.unwrap_or(PAUSE).max(LEAST_PAUSE))
            }
            300..400 => {
                let to = location.unwrap_or("elsewhere".into()).chars().take(QUOTED).collect::<String>();
                Outcome::Refused(format!("status {status}: it sends on to {to}; name that address in `reward.url`"))
            }
            _ => {
                let mut said = Vec::new();
                // What it says is only for the message.
                let _ = reader.take(QUOTED as u64).read_to_end(&mut said);
                let problem = format!("status {status}: {}", one_line(&String::from_utf8_lossy(&said)));
                if status >= 500 { Outcome::Failed(problem) } else { Outcome::Refused(problem) }
            }
        }
    }
}

impl Transport for Service {
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
        let most = frame::answer_bytes(tensors);
        let (begun, mut times, mut failures) = (Instant::now(), 0, 0);
        let problem = loop {
            times += 1;
            match self.once(&body, most) {
                Outcome::Answer(answer) => return Ok(answer),
                Outcome::Busy(wait) => {
                    if (begun.elapsed() + wait).as_secs_f64() > self.config.busy_timeout {
                        break format!("it was busy for {} s", self.config.busy_timeout);
                    }
                    std::thread::sleep(wait);
                }
                Outcome::Absent(problem)
                    if call == "hello" && begun.elapsed().as_secs_f64() < self.config.start_timeout =>
                {
                    if times == 1 {
                        tracing::info!("{}: {problem}; waiting until it listens", self.peer());
                    }
                    std::thread::sleep(PAUSE);
                }
                Outcome::Failed(problem) | Outcome::Absent(problem) if failures < self.config.retries => {
                    failures += 1;
                    tracing::warn!("{}: {problem}; asking again", self.peer());
                    std::thread::sleep(PAUSE);
                }
                Outcome::Failed(problem) | Outcome::Absent(problem) | Outcome::Refused(problem) => break problem,
            }
        };
        Err(Error::component(Fault::Failure, NoAnswer { url: self.config.url.clone(), call, times, problem }))
    }
}

/// Lines as one: a page of HTML is no message.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

roll_core::inventory::submit! {
    Registration {
        name: "http",
        summary: "A reward that is a service, asked over HTTP",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<Config>,
        keys: roll_core::keys::of::<Config>,
        factory: Factory::Reward(|options, _| {
            let config: Config = parse_options("reward", options)?;
            let on_missing = config.on_missing;
            Ok(Box::new(RemoteReward::new("http", Service::new(config)?, on_missing)?))
        }),
        planner: None,
    }
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
