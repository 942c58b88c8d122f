//! Signals that ask a run to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use roll_core::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Exit code of a run that was stopped, by a signal or after its checkpoint.
const CODE: i32 = 130;

/// What asks a run to stop. `mpirun` hands SIGUSR1 on to every rank at once; on SIGTERM and Ctrl-C it waits for
/// `odls_base_sigkill_timeout` seconds first, and kills after as many more.
#[cfg(unix)]
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, signal_hook::consts::SIGUSR1];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Whether the run was asked to stop.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on the first of these signals is only remembered; the next one ends the process at once.
    pub fn catch() -> Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in SIGNALS {
            // In this order: the second handler must not arm the first for the same signal.
            signal_hook::flag::register_conditional_shutdown(signal, CODE, asked.clone())
                .and_then(|_| signal_hook::flag::register(signal, asked.clone()))
                .map_err(|e| Error::Misuse(format!("signal {signal} cannot be caught: {e}")))?;
        }
        Ok(Self(asked))
    }

    /// Whether a signal came.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
