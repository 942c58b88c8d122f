//! Requests to one or several addresses of a chat completion service.

use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use roll_core::{Error, Result, check_seconds};
use roll_external::service::{NoAnswer, PAUSE, Service, ServiceOptions};

use super::JudgeConfig;

/// Greatest number of bytes of an answer that are read.
const MAX_ANSWER: u64 = 1 << 20;
/// Time for which an address that failed is asked only after the others.
const REST: Duration = Duration::from_secs(60);

/// No address answered.
#[derive(Debug, thiserror::Error)]
#[error("the judge {url} (`reward.url`) gave no answer (asked {}): {problem}", crate::remote::times(.times))]
pub(super) struct Unanswered {
    url: String,
    times: u32,
    problem: String,
    /// Whether the service rejected the request as such.
    pub rejected: bool,
}

/// The addresses of a service, asked round robin.
pub(super) struct Client {
    addresses: Vec<Address>,
    next: AtomicUsize,
    has_answered: AtomicBool,
    start_timeout: Duration,
    busy_timeout: Duration,
    retries: u32,
}

struct Address {
    service: Service,
    /// The end of the time for which other addresses are asked first.
    rests_until: Mutex<Instant>,
}

impl Address {
    fn rests(&self) -> bool {
        *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner) > Instant::now()
    }

    fn post(&self, body: &[u8]) -> std::result::Result<Vec<u8>, NoAnswer> {
        let mut answer = Vec::new();
        let read = self.service.post("application/json", body)?.take(MAX_ANSWER).read_to_end(&mut answer);
        read.map_err(|error| NoAnswer::Failed(format!("the answer was cut off: {error}")))?;
        Ok(answer)
    }
}

impl Client {
    /// Sends nothing. Fails on invalid addresses and time limits.
    pub fn new(config: &JudgeConfig) -> Result<Self> {
        let address = |url: &String| {
            let service = Service::new(ServiceOptions {
                section: "reward",
                url: &format!("{}/chat/completions", url.trim_end_matches('/')),
                token_env: config.token_env.as_deref(),
                timeout: config.timeout,
                keeps_connections: true,
            })?;
            Ok(Address { service, rests_until: Mutex::new(Instant::now()) })
        };
        let addresses: Vec<_> = config.url.all().iter().map(address).collect::<Result<_>>()?;
        if addresses.is_empty() {
            return Err(Error::config("reward.url", "expected an address such as http://127.0.0.1:8000/v1"));
        }
        Ok(Self {
            addresses,
            next: AtomicUsize::new(0),
            has_answered: AtomicBool::new(false),
            start_timeout: check_seconds("reward.start_timeout", config.start_timeout)?,
            busy_timeout: check_seconds("reward.busy_timeout", config.busy_timeout)?,
            retries: config.retries,
        })
    }

    /// Sends `body` until an address answers or the limits are reached; returns the body of the answer.
    pub fn ask(&self, body: &[u8]) -> std::result::Result<Vec<u8>, Unanswered> {
        let (begun, mut times, mut failures) = (Instant::now(), 0, 0);
        loop {
            let (url, no_answer) = match self.ask_each(body, &mut times) {
                Ok(answer) => return Ok(answer),
                Err(unanswered) => unanswered,
            };
            let is_starting = !self.has_answered.load(Ordering::Relaxed) && begun.elapsed() < self.start_timeout;
            let rejected = matches!(no_answer, NoAnswer::Rejected(_));
            let problem = match no_answer {
                NoAnswer::Busy(wait) if begun.elapsed() + wait <= self.busy_timeout => {
                    std::thread::sleep(wait);
                    continue;
                }
                NoAnswer::Busy(_) => {
                    format!("it was busy for {} s (`reward.busy_timeout`)", self.busy_timeout.as_secs_f64())
                }
                NoAnswer::ConnectionRefused(_) if is_starting => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                NoAnswer::ConnectionRefused(problem) | NoAnswer::Failed(problem) if failures < self.retries => {
                    failures += 1;
                    tracing::warn!("the judge {url}: {problem}; asking again");
                    std::thread::sleep(PAUSE);
                    continue;
                }
                NoAnswer::ConnectionRefused(problem)
                | NoAnswer::Failed(problem)
                | NoAnswer::Rejected(problem)
                | NoAnswer::Permanent(problem) => problem,
            };
            return Err(Unanswered { url, times, problem, rejected });
        }
    }

    /// Asks one address after the other until one answers or fails permanently. Otherwise returns the reason of one that
    /// is busy, or of the last one.
    fn ask_each(&self, body: &[u8], times: &mut u32) -> std::result::Result<Vec<u8>, (String, NoAnswer)> {
        let (resting, mut addresses): (Vec<_>, Vec<_>) = self.addresses.iter().partition(|address| address.rests());
        let next = self.next.fetch_add(1, Ordering::Relaxed) % addresses.len().max(1);
        addresses.rotate_left(next);
        let mut reason = None;
        for address in addresses.into_iter().chain(resting) {
            let is_busy = matches!(reason, Some((_, NoAnswer::Busy(_))));
            // A failed address may take its whole time limit to fail again.
            if is_busy && address.rests() {
                break;
            }
            *times += 1;
            let (no_answer, rest) = match address.post(body) {
                Ok(answer) => {
                    self.has_answered.store(true, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(NoAnswer::Busy(wait)) => (NoAnswer::Busy(wait), wait),
                Err(no_answer) => (no_answer, REST),
            };
            *address.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + rest;
            let is_permanent = matches!(no_answer, NoAnswer::Rejected(_) | NoAnswer::Permanent(_));
            if is_permanent || !is_busy {
                reason = Some((address.service.url().to_string(), no_answer));
            }
            if is_permanent {
                break;
            }
        }
        Err(reason.expect("a client has an address"))
    }
}
