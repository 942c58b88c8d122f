//! Work of other people's code on other people's files, which may panic or go on for ever.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

/// Does `work` on a thread of its own. The error says that it panicked, or that it took longer than `limit`; the thread
/// then goes on until the process ends, so that an error should end it.
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
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(format!("it panicked: {text}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_and_work_without_end_are_errors() {
        let long = Duration::from_secs(60);
        assert_eq!(contain(long, || 3), Ok(3));
        assert!(
            contain(long, move || if long.is_zero() { 1 } else { panic!("at {}", 7) })
                .unwrap_err()
                .contains("panicked: at 7")
        );
        let told = contain(Duration::from_millis(20), || thread::sleep(Duration::from_secs(600))).unwrap_err();
        assert!(told.contains("longer than 0.02 s"), "{told}");
    }
}
