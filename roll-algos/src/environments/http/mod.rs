//! An environment that is a service: the JSON of [`super::process`], one POST for each `reset` and `step`.
//!
//! ```text
//! -> {"session": "9f...", "turn": 0, "reset": {"seed": 7}}
//! <- {"observation": "..."}
//! -> {"session": "9f...", "turn": 1, "step": {"action": "<answer>Left</answer>"}}
//! <- {"observation": "...", "reward": 0.5, "terminated": false}
//! ```
//!
//! One service plays many episodes at the same time: `session` says which environment is meant, and a `reset` ends the
//! session's episode. A request is repeated only where the action cannot happen twice: a `reset` after any failure, a
//! `step` when nobody listened. A service that answers 429 or 503 has done nothing, and is asked again.
//!
//! What keeps a service from doing harm: an answer has at most `max_answer_bytes`, a request with its answer ends
//! within `timeout`, and no redirect is followed: actions and token go to `url` alone.

#[cfg(test)]
mod tests;

use std::io::Read;
use std::time::{Duration, Instant};

use roll_core::registry::{default_options, parse_options};
use roll_core::{Environment, Error, Factory, Observation, Options, Registration, Result, Transition};
use serde_json::Value;

use super::protocol::{self, Answer, Told};

const NAME: &str = "http";
/// How long to wait before asking again, when the service does not say.
const PAUSE: Duration = Duration::from_millis(500);
/// How long at least, whatever it says.
const LEAST_PAUSE: Duration = Duration::from_millis(20);
/// Bytes of an answer that is none which an error repeats.
const QUOTED: u64 = 300;

/// Options of the environment `http`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HttpOptions {
    /// Address of the service, `http://...` or `https://...`. A certificate is checked against the authorities that
    /// Mozilla trusts; for one of your own put a proxy before the service.
    pub url: String,
    /// Environment variable that holds the service's token, sent as `Authorization: Bearer`; none unless given. The
    /// token itself stands in no configuration, which runs keep.
    pub token_env: Option<String>,
    /// Seconds that a request may take.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// How often a request is repeated after a failure, where that cannot repeat an action: a `reset` after any
    /// failure of the connection and 5xx, a `step` if the connection was refused.
    pub retries: u32,
    /// Seconds that a service may be busy (429 or 503) before the episode is given up.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub busy_timeout: f64,
    /// Bytes that an answer may have.
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

/// The environment. Nothing is asked before the first episode.
pub struct Http {
    options: HttpOptions,
    agent: ureq::Agent,
    /// The header `Authorization`.
    authorization: Option<String>,
    session: String,
    /// Requests of the episode that were answered; `None` without one.
    turn: Option<u64>,
    told: Told,
}

/// What a request came to.
enum Outcome {
    Answer(Answer),
    /// Ask again after a while: nothing was done.
    Busy(Duration),
    /// Nobody listens: nothing was done.
    Absent(String),
    /// Something may have been done.
    Failed(String),
    /// Will not go better.
    Refused(String),
}

impl Http {
    /// With these options.
    pub fn new(options: HttpOptions) -> Result<Self> {
        let expected = || {
            let problem =
                format!("expected an address such as http://host:8000/ or https://..., found `{}`", options.url);
            Error::config("env.url", problem)
        };
        let uri: ureq::http::Uri = options.url.parse().map_err(|_| expected())?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
            return Err(expected());
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            let problem = "an address with a password would stand in the run's config.yaml; put the service's token \
                           into an environment variable and name it in `env.token_env`";
            return Err(Error::config("env.url", problem));
        }
        for (key, seconds) in [("env.timeout", options.timeout), ("env.busy_timeout", options.busy_timeout)] {
            // Beyond a year it is no limit, and `Duration` has one of its own.
            if !(seconds > 0.0 && seconds < 3.2e7) {
                return Err(Error::config(key, format!("expected seconds above 0, found {seconds}")));
            }
        }
        if options.max_answer_bytes == 0 {
            return Err(Error::config("env.max_answer_bytes", "expected at least 1, found 0"));
        }
        let token = |name: &String| match std::env::var(name) {
            Ok(token) if !token.is_empty() => Ok(format!("Bearer {token}")),
            _ => {
                let problem = format!("the environment variable `{name}` holds no token");
                Err(Error::config("env.token_env", problem))
            }
        };
        let authorization = options.token_env.as_ref().map(token).transpose()?;
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(Duration::from_secs_f64(options.timeout)))
            // Answers of any status are looked at here.
            .http_status_as_error(false)
            .max_redirects(0)
            // A connection that the service closed in the meantime would fail after the action was sent.
            .max_idle_connections(0)
            .build()
            .into();
        // Not of the run's seed: it tells environments of all ranks and runs apart, and no result depends on it.
        let session = format!("{:016x}", rand::random::<u64>());
        Ok(Self { options, agent, authorization, session, turn: None, told: Told::default() })
    }

    fn open(options: &Options) -> Result<Box<dyn Environment>> {
        Ok(Box::new(Self::new(parse_options("env", options)?)?))
    }

    /// Asks until there is an answer or no hope. `repeatable`: it does no harm if the service gets the request twice.
    fn ask(&self, mut request: Value, turn: u64, repeatable: bool) -> std::result::Result<Answer, String> {
        request["session"] = self.session.as_str().into();
        request["turn"] = turn.into();
        let body = request.to_string();
        let (begun, mut failures) = (Instant::now(), 0);
        loop {
            match self.once(&body) {
                Outcome::Answer(answer) => return answer.accepted(),
                Outcome::Busy(wait) => {
                    if (begun.elapsed() + wait).as_secs_f64() > self.options.busy_timeout {
                        return Err(format!("it was busy for {} s", self.options.busy_timeout));
                    }
                    std::thread::sleep(wait);
                }
                Outcome::Absent(problem) if failures < self.options.retries => {
                    failures += 1;
                    tracing::warn!("{}: {problem}; asking again", self.options.url);
                    std::thread::sleep(PAUSE);
                }
                Outcome::Failed(problem) if repeatable && failures < self.options.retries => {
                    failures += 1;
                    tracing::warn!("{}: {problem}; asking again", self.options.url);
                    std::thread::sleep(PAUSE);
                }
                Outcome::Absent(problem) | Outcome::Failed(problem) | Outcome::Refused(problem) => return Err(problem),
            }
        }
    }

    fn once(&self, body: &str) -> Outcome {
        let mut request = self.agent.post(&self.options.url).header("Content-Type", "application/json");
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
        let header =
            |name: &str| response.headers().get(name).map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
        let (status, wait, location) = (response.status().as_u16(), header("Retry-After"), header("Location"));
        let mut said = Vec::new();
        // One byte more than allowed tells an answer that is too long from one that just fits.
        let most = if status == 200 { self.options.max_answer_bytes as u64 + 1 } else { QUOTED };
        let read = response.body_mut().as_reader().take(most).read_to_end(&mut said);
        let text = || String::from_utf8_lossy(&said).trim().to_string();
        match status {
            200 if read.is_err() => Outcome::Failed("its answer was cut off".into()),
            200 if said.len() > self.options.max_answer_bytes => Outcome::Refused(format!(
                "its answer has more than {} bytes (`env.max_answer_bytes`)",
                self.options.max_answer_bytes
            )),
            200 => match String::from_utf8(said) {
                Ok(text) => Answer::parse(&text).map_or_else(Outcome::Refused, Outcome::Answer),
                Err(e) => Outcome::Refused(format!("its answer is no UTF-8: {}", protocol::shortened(e.as_bytes()))),
            },
            429 | 503 => {
                let seconds = wait.and_then(|wait| wait.trim().parse::<f64>().ok());
                let wait = seconds.filter(|s| (0.0..3600.0).contains(s)).map(Duration::from_secs_f64);
                Outcome::Busy(wait.unwrap_or(PAUSE).max(LEAST_PAUSE))
            }
            300..400 => {
                let to: String = location.unwrap_or("elsewhere".into()).chars().take(QUOTED as usize).collect();
                Outcome::Refused(format!("status {status}: it sends on to {to}; name that address in `env.url`"))
            }
            500.. => Outcome::Failed(format!("status {status}: {}", text())),
            _ => Outcome::Refused(format!("status {status}: {}", text())),
        }
    }

    fn failed(&self, problem: String) -> Error {
        Error::Unsupported(format!("the environment service {}: {problem}", self.options.url))
    }
}

impl Environment for Http {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        self.turn = None;
        let answer = self.ask(protocol::reset(seed), 0, true);
        let begun = answer.and_then(|answer| self.told.begun(answer)).map_err(|problem| self.failed(problem))?;
        self.turn = Some(0);
        Ok(begun)
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        let Some(turn) = self.turn.map(|turn| turn + 1) else {
            return Err(self.failed("a step without an episode".into()));
        };
        self.turn = Some(turn);
        let answer = self.ask(protocol::step(action), turn, false);
        answer.and_then(|answer| self.told.advanced(answer)).map_err(|problem| {
            // Whether the action happened is not known.
            self.turn = None;
            self.failed(problem)
        })
    }

    fn instructions(&self) -> String {
        self.told.instructions.clone()
    }

    fn solved(&self) -> Option<bool> {
        self.told.solved
    }
}

roll_core::inventory::submit! {
    Registration {
        name: NAME,
        summary: "An environment that is a service, asked over HTTP",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<HttpOptions>,
        keys: roll_core::keys::of::<HttpOptions>,
        factory: Factory::Environment(|options, _| Http::open(options)),
        planner: None,
    }
}
