//! Catches the signals that ask a run to stop with a checkpoint.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use roll_core::{Error, Result};
use roll_train::StopSignal;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::progress;

/// Exit code of a process that a second Ctrl-C ends at once. A run that stops with a checkpoint has the same code.
const CODE: i32 = 130;

/// Signals that ask a run to stop. `mpirun` hands SIGUSR1 on to every rank at once; on SIGTERM and Ctrl-C it waits for
/// `odls_base_sigkill_timeout` seconds first, and kills after as many more. SIGHUP comes when the terminal is closed.
#[cfg(unix)]
const SIGNALS: [i32; 4] = [SIGINT, SIGTERM, signal_hook::consts::SIGUSR1, SIGHUP];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// The number of SIGHUP on every system that has it.
const SIGHUP: i32 = 1;

/// Installs handlers for [`SIGNALS`], and returns the flag that they set. A later call returns the same flag, so that
/// ranks that are threads share it.
///
/// Several signals still mean one stop with a checkpoint: a scheduler may send SIGUSR1 before SIGTERM, and two pages of
/// `roll watch` may each send one. Only a second SIGINT, the Ctrl-C of a person who waits at a terminal, ends the
/// process at once. `nohup roll run` starts with SIGHUP ignored, and keeps it ignored when the terminal is closed.
pub fn catch() -> Result<StopSignal> {
    static CAUGHT: Mutex<Option<StopSignal>> = Mutex::new(None);
    let mut caught = CAUGHT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(signal) = &*caught {
        return Ok(signal.clone());
    }
    let signal = StopSignal::default();
    let failed = |number| Error::failed(format!("signal {number} cannot be caught"));
    // Set by the first SIGINT.
    let interrupted = Arc::new(AtomicBool::new(false));
    let interrupted_before = interrupted.clone();
    let clear_bars = move || {
        if interrupted_before.load(Ordering::Relaxed) {
            progress::clear();
        }
    };
    // Three handlers of SIGINT run in the order of their registration. The first two act only if the flag is set
    // already, on the second SIGINT; the third sets it, and must come last. SAFETY: the action reads atomics and writes
    // to a descriptor: it neither allocates nor locks, nor panics.
    unsafe { signal_hook::low_level::register(SIGINT, clear_bars) }
        .and_then(|_| signal_hook::flag::register_conditional_shutdown(SIGINT, CODE, interrupted.clone()))
        .and_then(|_| signal_hook::flag::register(SIGINT, interrupted))
        .map_err(failed(SIGINT))?;
    for number in SIGNALS.into_iter().filter(|number| *number != SIGHUP || !is_ignored(SIGHUP)) {
        signal_hook::flag::register(number, signal.flag()).map_err(failed(number))?;
    }
    *caught = Some(signal.clone());
    Ok(signal)
}

/// Whether the process ignores a signal; false on systems without `/proc`.
fn is_ignored(number: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (number - 1) & 1 == 1
}
