//! Signals that ask a run to stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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

/// Installs handlers: each of these signals asks the run to stop, however many come; only a second SIGINT, the Ctrl-C of
/// somebody who waits at a terminal, ends the process at once. A scheduler's SIGUSR1 before its SIGTERM and the buttons of
/// two pages mean one stop with a checkpoint. `nohup roll run`, which begins with SIGHUP ignored, continues when the
/// terminal is closed. Threads that are ranks share one signal.
pub fn catch() -> Result<StopSignal> {
    static CAUGHT: Mutex<Option<StopSignal>> = Mutex::new(None);
    let mut caught = CAUGHT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(signal) = &*caught {
        return Ok(signal.clone());
    }
    let signal = StopSignal::default();
    let failed = |number| Error::failed(format!("signal {number} cannot be caught"));
    let pressed = Arc::new(AtomicBool::new(false));
    let before = pressed.clone();
    let clear = move || {
        if before.load(Ordering::Relaxed) {
            progress::clear();
        }
    };
    // The order matters: the last handler must not arm the others for the same signal.
    // SAFETY: the action reads atomics and writes to a descriptor: it neither allocates nor locks, nor panics.
    unsafe { signal_hook::low_level::register(SIGINT, clear) }
        .and_then(|_| signal_hook::flag::register_conditional_shutdown(SIGINT, CODE, pressed.clone()))
        .and_then(|_| signal_hook::flag::register(SIGINT, pressed))
        .map_err(failed(SIGINT))?;
    for number in SIGNALS.into_iter().filter(|number| *number != SIGHUP || !is_ignored(SIGHUP)) {
        signal_hook::flag::register(number, signal.flag()).map_err(failed(number))?;
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
