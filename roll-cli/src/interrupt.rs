//! Signals that ask a run to stop.

use roll_core::{Error, Result};
use roll_train::StopSignal;
use signal_hook::consts::{SIGINT, SIGTERM};

/// Exit code of a run that was stopped, by a signal or after its checkpoint.
const CODE: i32 = 130;

/// What asks a run to stop. `mpirun` hands SIGUSR1 on to every rank at once; on SIGTERM and Ctrl-C it waits for
/// `odls_base_sigkill_timeout` seconds first, and kills after as many more.
#[cfg(unix)]
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, signal_hook::consts::SIGUSR1];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// From now on the first of these signals asks the run to stop; the next one ends the process at once.
pub fn catch() -> Result<StopSignal> {
    let signal = StopSignal::default();
    for number in SIGNALS {
        // In this order: the second handler must not arm the first for the same signal.
        signal_hook::flag::register_conditional_shutdown(number, CODE, signal.flag())
            .and_then(|_| signal_hook::flag::register(number, signal.flag()))
            .map_err(Error::failed(format!("signal {number} cannot be caught")))?;
    }
    Ok(signal)
}
