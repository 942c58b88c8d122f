//! Limits on the processes of environments: how many may be open, and how many may start at the same time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use roll_core::{Error, Result};
use roll_external::process::raise_open_files_limit;

/// Number of file descriptors that this program needs for a process: the pipes of standard input, output and error.
const PIPES: u64 = 3;
/// File descriptors that are not given to environments, for checkpoints, logs, tools and devices.
const OTHER_USES: u64 = 64;

/// Number of descriptors that the environments of this program have reserved.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// A reservation of the file descriptors of one environment, from its creation on. Its process starts later, but a run
/// that cannot open all of its processes must fail before the first step.
pub struct Descriptors;

impl Descriptors {
    /// Reserves them. Fails if this program may not open so many files.
    pub fn reserve() -> Result<Self> {
        let reserved = RESERVED.fetch_add(PIPES, Ordering::Relaxed) + PIPES;
        // Dropped on failure, so that the descriptors are free again.
        let reservation = Self;
        match raise_open_files_limit().filter(|limit| reserved + OTHER_USES > *limit) {
            None => Ok(reservation),
            Some(limit) => Err(Error::Unsupported(format!(
                "with another environment process this program would need {} open files, and it may have {limit} \
                 (`ulimit -Hn`): raise that limit, or play fewer episodes in a step",
                reserved + OTHER_USES
            ))),
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        RESERVED.fetch_sub(PIPES, Ordering::Relaxed);
    }
}

/// Times at which the processes that are still starting were begun.
static STARTING: Mutex<Vec<Instant>> = Mutex::new(Vec::new());
/// Notified when a process has started.
static STARTED: Condvar = Condvar::new();
/// After this time a process counts as started. If it is still not ready, it waits for something, such as a container,
/// and needs no core of this machine.
const START_LIMIT: Duration = Duration::from_secs(1);

/// Permission to start a process, held until the process has answered, for [`START_LIMIT`] at most. An interpreter that
/// loads its libraries takes a core: if hundreds started at once, they would exceed `env.timeout`.
pub struct StartPermit(Instant);

impl StartPermit {
    /// Waits until fewer processes are starting than there are cores (or than 16, if there are fewer cores).
    pub fn wait() -> Self {
        let limit = std::thread::available_parallelism().map_or(16, |cores| cores.get().max(16));
        let mut starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            starting.retain(|began| began.elapsed() < START_LIMIT);
            if starting.len() < limit {
                break;
            }
            let Some(oldest) = starting.iter().min() else { break };
            let remaining = START_LIMIT.saturating_sub(oldest.elapsed());
            starting = STARTED.wait_timeout(starting, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = Instant::now();
        starting.push(now);
        Self(now)
    }
}

impl Drop for StartPermit {
    fn drop(&mut self) {
        let mut starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(position) = starting.iter().position(|began| *began == self.0) {
            starting.swap_remove(position);
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
