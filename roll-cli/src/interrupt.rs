//! Catches the signals that ask a run to stop with a checkpoint.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use libc::{SIGINT, SIGTERM, c_int};
use roll_core::{Error, Result};
use roll_train::StopSignal;

use crate::progress;

/// Exit code of a process that a second Ctrl-C ends at once. A run that stops with a checkpoint has the same code.
const EXIT_CODE: i32 = 130;

/// Signals that ask a run to stop. `mpirun` hands SIGUSR1 on to every rank at once; on SIGTERM and Ctrl-C it waits for
/// `odls_base_sigkill_timeout` seconds first, and kills after the same time again. SIGHUP comes when the terminal is
/// closed.
#[cfg(unix)]
const SIGNALS: [i32; 4] = [SIGINT, SIGTERM, libc::SIGUSR1, SIGHUP];
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
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut are_installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    let signal = STOP.get_or_init(StopSignal::default);
    if *are_installed {
        return Ok(signal.clone());
    }
    for number in SIGNALS.into_iter().filter(|number| *number != SIGHUP || !is_ignored(SIGHUP)) {
        install(number).map_err(Error::failed(format!("signal {number} cannot be caught")))?;
    }
    *are_installed = true;
    Ok(signal.clone())
}

/// The run that the signals stop. It is set before the handlers are installed.
static STOP: OnceLock<StopSignal> = OnceLock::new();
/// Whether a first SIGINT came.
static HAS_INTERRUPT: AtomicBool = AtomicBool::new(false);

fn install(number: c_int) -> io::Result<()> {
    // SAFETY: `on_signal` has the signature of a handler. It reads and writes atomics, writes to a descriptor and may
    // end the process: it neither allocates nor locks, nor panics.
    match unsafe { libc::signal(number, on_signal as extern "C" fn(c_int) as usize) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

extern "C" fn on_signal(number: c_int) {
    if number == SIGINT && HAS_INTERRUPT.swap(true, Ordering::Relaxed) {
        progress::clear();
        // SAFETY: `_exit` may be called in signal handlers.
        unsafe { libc::_exit(EXIT_CODE) }
    }
    if let Some(signal) = STOP.get() {
        signal.ask();
    }
    // The handler stays installed on Unix. Elsewhere a signal removes it, so it is installed again.
    #[cfg(not(unix))]
    let _ = install(number);
}

/// Whether the process ignores a signal; false on systems without `/proc`.
fn is_ignored(number: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    // Signal n is bit n - 1 of the mask.
    mask >> (number - 1) & 1 == 1
}
