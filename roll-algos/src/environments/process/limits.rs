//! Limits on the processes of environments that are open or start at the same time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

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

/// Number of processes that are starting.
static STARTING: Mutex<usize> = Mutex::new(0);
static STARTED: Condvar = Condvar::new();

/// Permission to start a process, held until it has answered. An interpreter that loads its libraries takes a core, and
/// hundreds at once would exceed `env.timeout`.
pub struct StartPermit;

impl StartPermit {
    /// Waits until fewer processes start than there are cores, and at least 16.
    pub fn wait() -> Self {
        let most = std::thread::available_parallelism().map_or(16, |cores| cores.get().max(16));
        let starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut starting =
            STARTED.wait_while(starting, |starting| *starting >= most).unwrap_or_else(PoisonError::into_inner);
        *starting += 1;
        Self
    }
}

impl Drop for StartPermit {
    fn drop(&mut self) {
        *STARTING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        STARTED.notify_one();
    }
}
