//! Signals that ask a run to stop, and the one that a process dies of.

use roll_core::{Error, Result};
use roll_train::StopSignal;
use signal_hook::consts::{SIGINT, SIGTERM};

/// Exit code of a run that was stopped, by a signal or after its checkpoint.
const CODE: i32 = 130;

/// What asks a run to stop. `mpirun` hands SIGUSR1 on to every rank at once; on SIGTERM and Ctrl-C it waits for
/// `odls_base_sigkill_timeout` seconds first, and kills after as many more. SIGHUP comes when the terminal is closed.
#[cfg(unix)]
const SIGNALS: [i32; 4] = [SIGINT, SIGTERM, signal_hook::consts::SIGUSR1, SIGHUP];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Its number on every system that has it.
const SIGHUP: i32 = 1;

/// From now on the first of these signals asks the run to stop; the next one ends the process at once. `nohup roll run`,
/// which begins with SIGHUP ignored, goes on when the terminal is closed.
pub fn catch() -> Result<StopSignal> {
    let signal = StopSignal::default();
    for number in SIGNALS.into_iter().filter(|number| *number != SIGHUP || !is_ignored(SIGHUP)) {
        // In this order: the second handler must not arm the first for the same signal.
        signal_hook::flag::register_conditional_shutdown(number, CODE, signal.flag())
            .and_then(|_| signal_hook::flag::register(number, signal.flag()))
            .map_err(Error::failed(format!("signal {number} cannot be caught")))?;
    }
    Ok(signal)
}

/// From now on a process that is aborted within a call of a plugin says which: its code may have called `abort`,
/// panicked while it panicked, or overflowed its stack.
#[cfg(unix)]
pub fn tell_of_aborts() {
    // SAFETY: the action reads a variable of its thread and writes to a descriptor: it neither allocates nor locks, and
    // it does not panic. `abort` ends the process behind it.
    let told = unsafe { signal_hook::low_level::register(signal_hook::consts::SIGABRT, tell) };
    if let Err(error) = told {
        tracing::debug!("a plugin that aborts will not be named: {error}");
    }
}

/// Elsewhere the system tells nobody.
#[cfg(not(unix))]
pub fn tell_of_aborts() {}

#[cfg(unix)]
fn tell() {
    let Some((plugin, function)) = roll_core::plugin::under_way() else { return };
    for part in [
        "error: the process was aborted while it was calling `",
        function,
        "` of the plugin ",
        plugin,
        "\n  because: native code that ends the process cannot be held back; a run goes on from its newest checkpoint \
         with `roll run --resume RUN`\n",
    ] {
        // Nothing can be done about a reader that went away.
        let _ = rustix::io::write(std::io::stderr(), part.as_bytes());
    }
}

/// Whether the process ignores a signal, where the system says it in `/proc`.
fn is_ignored(number: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (number - 1) & 1 == 1
}
