//! Runs third-party code that may panic or hang on untrusted files.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use roll_core::communicator::panic_message;

/// Runs `work` on a thread of its own. Fails if it panics or takes longer than `limit`. After a timeout the thread runs
/// on until the process ends, so the caller should end the process.
pub fn contain<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let (done, result) = sync_channel(1);
    let thread = thread::Builder::new().name("contained".into()).spawn(move || {
        // The caller may have stopped waiting.
        let _ = done.send(work());
    });
    let thread = thread.map_err(|e| format!("no thread for it: {e}"))?;
    match result.recv_timeout(limit) {
        Ok(result) => Ok(result),
        Err(RecvTimeoutError::Timeout) => Err(format!("it took longer than {} s", limit.as_secs_f64())),
        Err(RecvTimeoutError::Disconnected) => {
            let panic = thread.join().err().unwrap_or_else(|| Box::new("it ended without a result"));
            Err(format!("it panicked: {}", panic_message(panic.as_ref()).unwrap_or("no message")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_and_timeouts_are_errors() {
        let long = Duration::from_secs(60);
        assert_eq!(contain(long, || 3), Ok(3));
        assert!(
            contain(long, move || if long.is_zero() { 1 } else { panic!("at {}", 7) })
                .unwrap_err()
                .contains("panicked: at 7")
        );
        let message = contain(Duration::from_millis(20), || thread::sleep(Duration::from_secs(600))).unwrap_err();
        assert!(message.contains("longer than 0.02 s"), "{message}");
    }
}
