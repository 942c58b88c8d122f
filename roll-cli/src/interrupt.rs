//! Signals that ask a run to stop.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use roll_core::{Error, Result};
use roll_train::StopSignal;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::progress;

/// Exit code of a run that was stopped, by a signal or after its checkpoint.
const CODE: i32 = 130;

/// Signals that ask a run to stop. `mpirun` hands SIGUSR1 on to every rank at once; on SIGTERM and Ctrl-C it waits for
/// `odls_base_sigkill_timeout` seconds first, and kills after as many more. SIGHUP comes when the terminal is closed.
#[cfg(unix)]
const SIGNALS: [i32; 4] = [SIGINT, SIGTERM, signal_hook::consts::SIGUSR1, SIGHUP];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Its number on every system that has it.
const SIGHUP: i32 = 1;

/// Installs handlers: the first of these signals asks the run to stop; the next one ends the process at once. `nohup roll
/// run`, which begins with SIGHUP ignored, continues when the terminal is closed. Threads that are ranks share one
/// signal.
pub fn catch() -> Result<StopSignal> {
    static CAUGHT: Mutex<Option<StopSignal>> = Mutex::new(None);
    let mut caught = CAUGHT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(signal) = &*caught {
        return Ok(signal.clone());
    }
    let signal = StopSignal::default();
    for number in SIGNALS.into_iter().filter(|number| *number != SIGHUP || !is_ignored(SIGHUP)) {
        let asked = signal.flag();
        let clear = move || {
            if asked.load(Ordering::Relaxed) {
                progress::clear();
            }
        };
        // The order matters: the last handler must not arm the others for the same signal.
        // SAFETY: the action reads atomics and writes to a descriptor: it neither allocates nor locks, nor panics.
        unsafe { signal_hook::low_level::register(number, clear) }
            .and_then(|_| signal_hook::flag::register_conditional_shutdown(number, CODE, signal.flag()))
            .and_then(|_| signal_hook::flag::register(number, signal.flag()))
            .map_err(Error::failed(format!("signal {number} cannot be caught")))?;
    }
    *caught = Some(signal.clone());
    Ok(signal)
}

/// Whether the process ignores a signal; false if `/proc` does not list it.
fn is_ignored(number: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (number - 1) & 1 == 1
}
