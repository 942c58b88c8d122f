//! Requests to a service, for rewards, environments and engines over HTTP. [`Service`] sends a request once; [`Repeats`]
//! repeats a request that has no answer.
//!
//! Safeguards: a request has a time limit that includes its answer, and redirects are not followed, so that body and
//! token are sent to one address only. The caller limits how much of an answer is read.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ureq::http::Uri;

use roll_core::{Error, Result, check_seconds};

/// Delay before a retry if the service does not name one.
const DEFAULT_PAUSE: Duration = Duration::from_millis(500);
/// Minimum delay before a retry.
const LEAST_PAUSE: Duration = Duration::from_millis(20);
/// Longest delay in seconds that a service may name.
const MAX_RETRY_AFTER: f64 = 3600.0;
/// How long an idle connection is kept for another request, to services for which a repeated request does no harm.
pub const IDLE_LIMIT: Duration = Duration::from_secs(15);
/// Maximum number of bytes of an invalid answer that an error quotes.
const MAX_QUOTED: usize = 300;

/// Address and request options of a service, from a section of the configuration.
#[derive(Clone, Debug)]
pub struct ServiceOptions<'a> {
    /// The section of the configuration, which errors name: `reward`, `env`.
    pub section: &'a str,
    /// Address, `http://...` or `https://...`.
    pub url: &'a str,
    /// Environment variable that holds the token, sent as `Authorization: Bearer`.
    pub token_env: Option<&'a str>,
    /// Seconds that a request may take with its answer.
    pub timeout: f64,
    /// How long an idle connection is kept for another request. `None`: each connection serves one request.
    ///
    /// If the service closes an idle connection meanwhile, the next request fails after it was sent, and it is unknown
    /// whether the request arrived.
    pub keeps_connections: Option<Duration>,
}

/// A service.
pub struct Service {
    section: String,
    url: String,
    agent: ureq::Agent,
    /// The header `Authorization`.
    authorization: Option<String>,
}

/// The reason why a request has no answer.
#[derive(Clone, Debug, PartialEq)]
pub enum NoAnswer {
    /// The service is busy (429 or 503) and did nothing: retry after this delay.
    Busy(Duration),
    /// The service did nothing.
    ConnectionRefused(String),
    /// A failure that may be temporary; the service may have done the work.
    Failed(String),
    /// The service rejects this request (400 or 422).
    Rejected(String),
    /// Any other permanent failure.
    Permanent(String),
}

impl Service {
    /// Creates a client; sends no request yet.
    ///
    /// # Errors
    /// Fails on an invalid address or one with a password, on a missing token, and on an invalid time limit; the error
    /// names the key `section.url`, `section.token_env` or `section.timeout`.
    pub fn new(options: ServiceOptions<'_>) -> Result<Self> {
        let ServiceOptions { section, url, token_env, timeout, keeps_connections } = options;
        check_url(section, url)?;
        let timeout = check_seconds(&format!("{section}.timeout"), timeout)?;
        let authorization = token_env.map(|name| bearer(section, name)).transpose()?;
        let mut builder = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            // `post_within` looks at every status itself.
            .http_status_as_error(false)
            .max_redirects(0);
        builder = match keeps_connections {
            Some(limit) => builder.max_idle_age(limit),
            None => builder.max_idle_connections(0),
        };
        Ok(Self { section: section.into(), url: url.into(), agent: builder.build().into(), authorization })
    }

    /// The address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Sends `body` once; returns the body of an answer of status 200.
    pub fn post(&self, content_type: &str, body: &[u8]) -> std::result::Result<Box<dyn Read>, NoAnswer> {
        self.post_within(None, content_type, body)
    }

    /// Sends `body` once, and waits for at most `limit`, if that is less than the service's own limit.
    pub fn post_within(
        &self,
        limit: Option<Duration>,
        content_type: &str,
        body: &[u8],
    ) -> std::result::Result<Box<dyn Read>, NoAnswer> {
        let service_limit = self.agent.config().timeouts().global;
        // The shorter one of the limits that there are.
        let shorter_limit = service_limit.into_iter().chain(limit).min();
        let request = self.agent.post(&self.url).config().timeout_global(shorter_limit).build();
        self.answer(self.authorized(request.header("Content-Type", content_type)).send(body))
    }

    /// Asks with GET; returns the body of an answer of status 200.
    pub fn get(&self) -> std::result::Result<Box<dyn Read>, NoAnswer> {
        self.answer(self.authorized(self.agent.get(&self.url)).call())
    }

    fn authorized<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.authorization {
            Some(authorization) => request.header("Authorization", authorization),
            None => request,
        }
    }

    /// The body of an answer of status 200, or why the service gave no answer.
    fn answer(
        &self,
        response: std::result::Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> std::result::Result<Box<dyn Read>, NoAnswer> {
        let response = match response {
            Ok(response) => response,
            Err(ureq::Error::Io(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                return Err(NoAnswer::ConnectionRefused(error.to_string()));
            }
            Err(error) => return Err(NoAnswer::Failed(error.to_string())),
        };
        let header =
            |name: &str| response.headers().get(name).map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
        let (status, retry_after, location) = (response.status().as_u16(), header("Retry-After"), header("Location"));
        let reader = response.into_body().into_reader();
        Err(match status {
            200 => return Ok(Box::new(reader)),
            429 | 503 => NoAnswer::Busy(pause(retry_after.as_deref())),
            300..400 => {
                let to: String = location.unwrap_or("elsewhere".into()).chars().take(MAX_QUOTED).collect();
                let key = format!("{}.url", self.section);
                NoAnswer::Permanent(format!("status {status}: it redirects to {to}; name that address in `{key}`"))
            }
            400 | 422 => NoAnswer::Rejected(format!("status {status}: {}", excerpt(reader))),
            500.. => NoAnswer::Failed(format!("status {status}: {}", excerpt(reader))),
            _ => NoAnswer::Permanent(format!("status {status}: {}", excerpt(reader))),
        })
    }
}

/// How long and how often a request without an answer is repeated.
pub struct Repeats {
    section: &'static str,
    retries: u32,
    busy_timeout: Duration,
    start_timeout: Duration,
    /// Whether the service has ever answered. If so, it is not starting any more: when it does not listen, it has
    /// failed.
    has_answered: AtomicBool,
}

/// The reason why a request has no answer after its repetitions.
#[derive(Debug, thiserror::Error)]
#[error("no answer from {peer} (attempts: {attempts}): {problem}")]
pub struct Unanswered {
    /// The service, as errors name it.
    pub peer: String,
    /// Number of attempts.
    pub attempts: u32,
    /// The reason of the last attempt.
    pub problem: String,
    /// Whether the service rejected the request as such.
    pub was_rejected: bool,
}

impl Repeats {
    /// Allows at most `retries` repetitions after failures. While the service is busy, any number of repetitions is
    /// allowed for `busy_timeout` seconds. Before its first answer, a service may take `start_timeout` seconds until it
    /// listens.
    ///
    /// # Errors
    /// Fails on invalid limits; the error names the key `section.busy_timeout` or `section.start_timeout`.
    pub fn new(section: &'static str, retries: u32, busy_timeout: f64, start_timeout: Option<f64>) -> Result<Self> {
        let check = |key, seconds| check_seconds(&format!("{section}.{key}"), seconds);
        let busy_timeout = check("busy_timeout", busy_timeout)?;
        let start_timeout = start_timeout.map(|seconds| check("start_timeout", seconds)).transpose()?;
        let start_timeout = start_timeout.unwrap_or_default();
        Ok(Self { section, retries, busy_timeout, start_timeout, has_answered: AtomicBool::new(false) })
    }

    /// Calls `attempt` until it has an answer or a limit is reached. `peer` names the service in errors. If
    /// `may_receive_twice` is false, a request that the service may have received is not repeated.
    pub fn ask<T>(
        &self,
        peer: &str,
        may_receive_twice: bool,
        mut attempt: impl FnMut() -> std::result::Result<T, NoAnswer>,
    ) -> std::result::Result<T, Unanswered> {
        let (start, mut attempts, mut failures) = (Instant::now(), 0, 0);
        // Each case either waits and continues with another attempt, or is the reason to give up.
        loop {
            attempts += 1;
            let no_answer = match attempt() {
                Ok(answer) => {
                    self.has_answered.store(true, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(no_answer) => no_answer,
            };
            let is_starting = !self.has_answered.load(Ordering::Relaxed) && start.elapsed() < self.start_timeout;
            let was_rejected = matches!(no_answer, NoAnswer::Rejected(_));
            let was_refused = matches!(no_answer, NoAnswer::ConnectionRefused(_));
            let problem = match no_answer {
                NoAnswer::Busy(wait) if start.elapsed() + wait <= self.busy_timeout => {
                    std::thread::sleep(wait);
                    continue;
                }
                NoAnswer::Busy(_) => {
                    let limit = self.busy_timeout.as_secs_f64();
                    format!("it is busy and cannot be asked again within {limit} s (`{}.busy_timeout`)", self.section)
                }
                NoAnswer::ConnectionRefused(problem) if is_starting => {
                    if attempts == 1 {
                        tracing::info!("{peer}: {problem}; waiting until it listens");
                    }
                    std::thread::sleep(DEFAULT_PAUSE);
                    continue;
                }
                NoAnswer::ConnectionRefused(problem) | NoAnswer::Failed(problem)
                    if (may_receive_twice || was_refused) && failures < self.retries =>
                {
                    failures += 1;
                    tracing::warn!("{peer}: {problem}; asking again");
                    std::thread::sleep(DEFAULT_PAUSE);
                    continue;
                }
                NoAnswer::ConnectionRefused(problem)
                | NoAnswer::Failed(problem)
                | NoAnswer::Rejected(problem)
                | NoAnswer::Permanent(problem) => problem,
            };
            return Err(Unanswered { peer: peer.into(), attempts, problem, was_rejected });
        }
    }
}

fn check_url(section: &str, url: &str) -> Result<()> {
    let key = format!("{section}.url");
    let invalid_url = || {
        let problem = format!("expected an address such as http://host:8000/ or https://..., found `{url}`");
        Error::config(&key, problem)
    };
    let uri: Uri = url.parse().map_err(|_| invalid_url())?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
        return Err(invalid_url());
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        let problem = format!(
            "an address with a password would be stored in the run's config.yaml; put the service's token into an \
             environment variable and name it in `{section}.token_env`"
        );
        return Err(Error::config(key, problem));
    }
    Ok(())
}

/// The header `Authorization` with the token of the environment variable `name`.
fn bearer(section: &str, name: &str) -> Result<String> {
    match std::env::var(name) {
        Ok(token) if !token.is_empty() => Ok(format!("Bearer {token}")),
        _ => {
            let problem = format!("the environment variable `{name}` holds no token");
            Err(Error::config(format!("{section}.token_env"), problem))
        }
    }
}

/// The delay before a retry, from the header `Retry-After` if it has a number of seconds below [`MAX_RETRY_AFTER`].
fn pause(retry_after: Option<&str>) -> Duration {
    let seconds = retry_after.and_then(|text| text.trim().parse::<f64>().ok());
    let wait = seconds.filter(|s| (0.0..MAX_RETRY_AFTER).contains(s)).map(Duration::from_secs_f64);
    wait.unwrap_or(DEFAULT_PAUSE).max(LEAST_PAUSE)
}

/// The beginning of an answer as one line without control characters, for an error message.
pub fn excerpt(reader: impl Read) -> String {
    let mut bytes = Vec::new();
    // Text that was read before a failure counts too.
    let _ = reader.take(MAX_QUOTED as u64).read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).replace(char::is_control, " ");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn refused(change: impl FnOnce(&mut ServiceOptions<'_>)) -> String {
        let mut options = ServiceOptions {
            section: "env",
            url: "http://127.0.0.1:1/",
            token_env: None,
            timeout: 1.0,
            keeps_connections: None,
        };
        change(&mut options);
        Service::new(options).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn invalid_options_name_their_key() {
        for wrong in ["", "example.org/score", "ftp://example.org", "https://", "http:///score", "http://a b/"] {
            let problem = refused(|o| o.url = wrong);
            assert!(problem.contains("env.url") && problem.contains(&format!("`{wrong}`")), "{problem}");
        }
        let problem = refused(|o| o.url = "http://user:secret@127.0.0.1:1/");
        assert!(problem.contains("env.token_env") && !problem.contains("secret"), "{problem}");
        assert!(refused(|o| o.token_env = Some("NO_SUCH_TOKEN")).contains("NO_SUCH_TOKEN"));
        assert!(refused(|o| o.timeout = f64::NAN).contains("env.timeout"));
    }

    #[test]
    fn pauses_follow_the_service_within_bounds() {
        let seconds = |header| pause(header).as_secs_f64();
        assert_eq!([None, Some("tomorrow"), Some("NaN"), Some("-1"), Some("1e9")].map(seconds), [0.5; 5]);
        assert_eq!([Some(" 2.5 "), Some("0")].map(seconds), [2.5, 0.02]);
    }
}
