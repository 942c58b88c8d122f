//! Requests to one or several addresses of a chat completion service.

use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use roll_core::{Error, Result, check_seconds};
use roll_external::service::{NoAnswer, PAUSE, Service, ServiceOptions};

use super::JudgeConfig;

/// Longest body of an answer that is read: log-probabilities of a short answer need a few KiB.
const MAX_ANSWER: u64 = 1 << 20;
/// Time for which an address that failed is asked only after the others.
const REST: Duration = Duration::from_secs(60);

/// No address answered.
#[derive(Debug, thiserror::Error)]
#[error("the judge {url} gave no answer (asked {}): {problem}", crate::remote::times(.times))]
pub(super) struct Unanswered {
    url: String,
    times: u32,
    problem: String,
    /// Whether the service rejected the request as such.
    pub rejected: bool,
}

/// The addresses, asked round robin.
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

    fn rest(&self, time: Duration) {
        *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + time;
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
        let urls = config.url.all();
        if urls.is_empty() || urls.iter().any(|url| url.is_empty()) {
            let problem = "missing: the base address of the service, such as http://127.0.0.1:8000/v1";
            return Err(Error::config("reward.url", problem));
        }
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
        Ok(Self {
            addresses: urls.iter().map(address).collect::<Result<_>>()?,
            next: AtomicUsize::new(0),
            has_answered: AtomicBool::new(false),
            start_timeout: check_seconds("reward.start_timeout", config.start_timeout)?,
            busy_timeout: check_seconds("reward.busy_timeout", config.busy_timeout)?,
            retries: config.retries,
        })
    }

    /// The body of the first answer to `body`.
    pub fn ask(&self, body: &[u8]) -> std::result::Result<Vec<u8>, Unanswered> {
        let (begun, mut times, mut failures) = (Instant::now(), 0, 0);
        loop {
            let (url, no_answer) = match self.ask_each(body, &mut times) {
                Ok(answer) => return Ok(answer),
                Err(unanswered) => unanswered,
            };
            let is_starting = !self.has_answered.load(Ordering::Relaxed) && begun.elapsed() < self.start_timeout;
            let rejected = matches!(no_answer, NoAnswer::Rejected(_));
            let wait = match no_answer {
                NoAnswer::Busy(wait) if begun.elapsed() + wait <= self.busy_timeout => wait,
                NoAnswer::ConnectionRefused(_) if is_starting => PAUSE,
                NoAnswer::ConnectionRefused(problem) | NoAnswer::Failed(problem) if failures < self.retries => {
                    failures += 1;
                    tracing::warn!("the judge {url}: {problem}; asking again");
                    PAUSE
                }
                no_answer => {
                    let problem = match no_answer {
                        NoAnswer::Busy(_) => {
                            format!("it was busy for {} s (`reward.busy_timeout`)", self.busy_timeout.as_secs_f64())
                        }
                        NoAnswer::ConnectionRefused(problem) | NoAnswer::Failed(problem) => {
                            format!("{problem} (`reward.timeout`, `reward.retries`)")
                        }
                        NoAnswer::Rejected(problem) | NoAnswer::Permanent(problem) => problem,
                    };
                    return Err(Unanswered { url, times, problem, rejected });
                }
            };
            std::thread::sleep(wait);
        }
    }

    /// Asks one address after the other until one answers. Otherwise returns the address that may answer soonest, and
    /// why it did not.
    fn ask_each(&self, body: &[u8], times: &mut u32) -> std::result::Result<Vec<u8>, (String, NoAnswer)> {
        let delay = |no_answer: &NoAnswer| match no_answer {
            NoAnswer::Busy(wait) => *wait,
            _ => Duration::MAX,
        };
        let mut soonest: Option<(String, NoAnswer)> = None;
        for address in self.in_turn() {
            // A failed address may take the whole time limit to fail again.
            if matches!(soonest, Some((_, NoAnswer::Busy(_)))) && address.rests() {
                break;
            }
            *times += 1;
            let no_answer = match address.post(body) {
                Ok(answer) => {
                    self.has_answered.store(true, Ordering::Relaxed);
                    address.rest(Duration::ZERO);
                    return Ok(answer);
                }
                Err(no_answer) => no_answer,
            };
            let url = address.service.url().to_string();
            match &no_answer {
                NoAnswer::Rejected(_) | NoAnswer::Permanent(_) => return Err((url, no_answer)),
                NoAnswer::Busy(wait) => address.rest(*wait),
                NoAnswer::ConnectionRefused(_) | NoAnswer::Failed(_) => address.rest(REST),
            }
            if soonest.as_ref().is_none_or(|(_, other)| delay(&no_answer) < delay(other)) {
                soonest = Some((url, no_answer));
            }
        }
        Err(soonest.expect("a client has at least one address"))
    }

    /// All addresses from the next one on, and then those that rest.
    fn in_turn(&self) -> Vec<&Address> {
        let (resting, mut addresses): (Vec<_>, Vec<_>) = self.addresses.iter().partition(|address| address.rests());
        let next = self.next.fetch_add(1, Ordering::Relaxed) % addresses.len().max(1);
        addresses.rotate_left(next);
        addresses.extend(resting);
        addresses
    }
}
