//! Limits on the processes of environments that are open or start at the same time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use roll_core::{Error, Result};
use roll_external::process::open_files_limit;

/// File descriptors of a process: its standard input, output and error.
const PIPES: u64 = 3;
/// File descriptors that are left for everything else, such as checkpoints, logs, tools and devices.
const LEFT: u64 = 64;

/// Descriptors that the environments of this program have reserved.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// The file descriptors of one environment, reserved from its creation on: its process starts later, and a run that
/// cannot open all of them must fail before its first step.
pub struct Descriptors;

impl Descriptors {
    /// Reserves them. Fails if this program may not open so many files.
    pub fn reserve() -> Result<Self> {
        let reserved = RESERVED.fetch_add(PIPES, Ordering::Relaxed) + PIPES;
        let own = Self;
        match open_files_limit().filter(|limit| reserved + LEFT > *limit) {
            None => Ok(own),
            Some(limit) => Err(Error::Unsupported(format!(
                "with another environment process this program would need {} open files, and it may have {limit} \
                 (`ulimit -Hn`): raise that limit, or play fewer episodes in a step",
                reserved + LEFT
            ))),
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        RESERVED.fetch_sub(PIPES, Ordering::Relaxed);
    }
}

/// When those processes began that are starting.
static STARTING: Mutex<Vec<Instant>> = Mutex::new(Vec::new());
static STARTED: Condvar = Condvar::new();
/// After this time a process counts as started: what it still waits for, such as a container, takes no core here.
const START_SECONDS: Duration = Duration::from_secs(1);

/// Permission to start a process, held until it has answered, for [`START_SECONDS`] at most. An interpreter that loads
/// its libraries takes a core, and hundreds at once would exceed `env.timeout`.
pub struct StartPermit(Instant);

impl StartPermit {
    /// Waits until fewer processes start than there are cores, and at least 16.
    pub fn wait() -> Self {
        let most = std::thread::available_parallelism().map_or(16, |cores| cores.get().max(16));
        let mut starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            starting.retain(|began| began.elapsed() < START_SECONDS);
            let Some(first) = starting.iter().min().filter(|_| starting.len() >= most) else { break };
            let left = START_SECONDS.saturating_sub(first.elapsed());
            starting = STARTED.wait_timeout(starting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = Instant::now();
        starting.push(now);
        Self(now)
    }
}

impl Drop for StartPermit {
    fn drop(&mut self) {
        let mut starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = starting.iter().position(|began| *began == self.0) {
            starting.swap_remove(place);
        }
        STARTED.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_start_holds_its_place_for_a_second() {
        let most = std::thread::available_parallelism().map_or(16, |cores| cores.get().max(16));
        let begun = Instant::now();
        let permits: Vec<StartPermit> = (0..most + 1).map(|_| StartPermit::wait()).collect();
        let waited = begun.elapsed();
        assert!((0.9..5.0).contains(&waited.as_secs_f64()), "{waited:?}");
        drop(permits);
        let begun = Instant::now();
        (0..most * 3).for_each(|_| drop(StartPermit::wait()));
        assert!(begun.elapsed() < Duration::from_millis(900), "those that answered make room at once");
    }
}
