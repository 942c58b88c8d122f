//! Sends requests to one or several addresses of a chat completion service.

use std::io::Read;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use roll_core::{Error, Result};
use roll_external::service::{IDLE_LIMIT, NoAnswer, Repeats, Service, ServiceOptions, Unanswered};

use super::JudgeConfig;

/// Greatest number of bytes of an answer that are read.
const MAX_ANSWER: u64 = 1 << 20;
/// Time for which an address that failed is asked only after the others.
const REST_TIME: Duration = Duration::from_secs(60);
/// Whether the service may receive a request twice. It may, because a question changes nothing at the service.
const MAY_RECEIVE_TWICE: bool = true;

/// The addresses of a service, asked round robin.
pub(super) struct Client {
    addresses: Vec<Address>,
    /// Number of calls of [`Client::ask_each`] so far. Modulo the number of addresses that do not rest, it is the index
    /// of the one among these addresses that is asked first.
    next: AtomicUsize,
    /// Number of requests that were sent.
    sent: AtomicU64,
    repeats: Repeats,
}

/// One address of the service.
struct Address {
    service: Service,
    /// Until this time the address rests: other addresses are asked first.
    rests_until: Mutex<Instant>,
}

impl Address {
    /// Whether the address rests, after it was busy or failed.
    fn is_resting(&self) -> bool {
        *self.rests_until.lock().unwrap_or_else(PoisonError::into_inner) > Instant::now()
    }

    /// Sends one request and reads the answer.
    fn post(&self, body: &[u8]) -> std::result::Result<Vec<u8>, NoAnswer> {
        let mut answer = Vec::new();
        let read = self.service.post("application/json", body)?.take(MAX_ANSWER).read_to_end(&mut answer);
        read.map_err(|error| NoAnswer::Failed(format!("the answer was cut off: {error}")))?;
        Ok(answer)
    }
}

impl Client {
    /// Creates the client without sending anything. Fails on invalid addresses and time limits.
    pub fn new(config: &JudgeConfig) -> Result<Self> {
        let address = |url: &String| {
            let service = Service::new(ServiceOptions {
                section: "reward",
                url: &format!("{}/chat/completions", url.trim_end_matches('/')),
                token_env: config.token_env.as_deref(),
                timeout: config.timeout,
                keeps_connections: Some(IDLE_LIMIT),
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
            sent: AtomicU64::new(0),
            repeats: Repeats::new("reward", config.retries, config.busy_timeout, Some(config.start_timeout))?,
        })
    }

    /// Number of requests that were sent so far.
    pub fn sent_count(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Sends `body` until an address answers or the limits are reached; returns the body of the answer.
    pub fn ask(&self, body: &[u8]) -> std::result::Result<Vec<u8>, Unanswered> {
        let (mut last_url, mut times) = (String::new(), 0);
        let asked = self.repeats.ask("the service", MAY_RECEIVE_TWICE, || {
            self.ask_each(body, &mut times).map_err(|(url, no_answer)| {
                last_url = url;
                no_answer
            })
        });
        asked.map_err(|reason| Unanswered {
            peer: format!("the service {last_url} (`reward.url`)"),
            attempts: times,
            ..reason
        })
    }

    /// Asks one address after the other until one answers or fails permanently. Adds the number of requests to `times`.
    /// If none answers, returns an address and the reason: the address that failed permanently, else the first busy
    /// one, else the last one.
    fn ask_each(&self, body: &[u8], times: &mut u32) -> std::result::Result<Vec<u8>, (String, NoAnswer)> {
        let (resting, mut addresses): (Vec<_>, Vec<_>) =
            self.addresses.iter().partition(|address| address.is_resting());
        let next = self.next.fetch_add(1, Ordering::Relaxed) % addresses.len().max(1);
        addresses.rotate_left(next);
        let mut reason = None;
        for address in addresses.into_iter().chain(resting) {
            let another_is_busy = matches!(reason, Some((_, NoAnswer::Busy(_))));
            // A resting address is not asked if waiting for a busy one may help, because a failed address may take its
            // whole time limit to fail again.
            if another_is_busy && address.is_resting() {
                break;
            }
            *times += 1;
            self.sent.fetch_add(1, Ordering::Relaxed);
            let (no_answer, rest) = match address.post(body) {
                Ok(answer) => return Ok(answer),
                Err(NoAnswer::Busy(wait)) => (NoAnswer::Busy(wait), wait),
                Err(no_answer) => (no_answer, REST_TIME),
            };
            *address.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + rest;
            let is_permanent = matches!(no_answer, NoAnswer::Rejected(_) | NoAnswer::Permanent(_));
            if is_permanent || !another_is_busy {
                reason = Some((address.service.url().to_string(), no_answer));
            }
            if is_permanent {
                break;
            }
        }
        Err(reason.expect("`Client::new` refuses a client without an address"))
    }
}
