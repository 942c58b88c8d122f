//! Starting threads without a panic. A system limits the threads of a user or a container, and `std::thread::spawn`
//! panics beyond the limit; the functions here return an error, or work with fewer threads.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// Starts a thread. The error names the limit that usually is the reason.
pub fn spawn<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work).map_err(|error| refused(name, &error))
}

/// Starts a thread in a scope. The error names the limit that usually is the reason.
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name.into()).spawn_scoped(scope, work).map_err(|error| refused(name, &error))
}

/// The error of a thread that the system refuses to start, with a remedy.
fn refused(name: &str, error: &io::Error) -> io::Error {
    let reason = format!(
        "no thread for {name} can be started ({error}): raise the limit of processes and threads (`ulimit -u`, or a \
         container's limit of pids), or use fewer at the same time"
    );
    io::Error::new(error.kind(), reason)
}

/// Calls `f` for all items, for at most `at_once` of them at the same time. The calling thread takes part, so that the
/// work is only slower if threads cannot be started. A panic of `f` is passed on.
pub fn in_parallel<T: Send>(items: &mut [T], at_once: usize, f: impl Fn(&mut T) + Sync) {
    let other_threads = items.len().min(at_once).saturating_sub(1);
    in_parallel_with(items, other_threads, f, || ());
}

/// Runs `here` on the calling thread, and meanwhile calls `f` for all items on at most `threads` other threads. Once
/// `here` has returned, the calling thread takes part in the work on the remaining items. A panic of `f` is passed on.
pub fn in_parallel_with<T: Send, R>(
    items: &mut [T],
    threads: usize,
    f: impl Fn(&mut T) + Sync,
    here: impl FnOnce() -> R,
) -> R {
    let threads = items.len().min(threads);
    let remaining = Mutex::new(items.iter_mut());
    let next = || remaining.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(item) = next() {
            f(item);
        }
    };
    std::thread::scope(|scope| {
        // Stops at the first thread that the system refuses.
        let started: Vec<_> = (0..threads).map_while(|_| spawn_scoped(scope, "concurrent work", work).ok()).collect();
        let result = here();
        work();
        for thread in started {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
        result
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::Command;
    use std::time::Duration;

    use super::*;
    use crate::ThreadRanks;

    #[test]
    fn items_are_worked_on_at_the_same_time_and_beside_the_caller() {
        let barrier = std::sync::Barrier::new(4);
        let mut items = [1, 2, 3];
        let meet = |item: &mut i32| {
            barrier.wait();
            *item *= 2;
        };
        let met = in_parallel_with(&mut items, 3, meet, || {
            barrier.wait();
            "here"
        });
        assert_eq!(met, "here");
        assert_eq!(items, [2, 4, 6]);
        in_parallel(&mut items, 2, |item| *item += 1);
        assert_eq!(items, [3, 5, 7]);
        in_parallel(&mut [0; 0], 2, |_| unreachable!());
    }

    #[test]
    fn a_panic_is_passed_on() {
        let panics = || in_parallel(&mut [1, 2, 3], 3, |item| assert_ne!(*item, 2, "the second"));
        let panic = std::panic::catch_unwind(panics).unwrap_err();
        assert!(crate::communicator::panic_message(panic.as_ref()).unwrap().contains("the second"));
    }

    /// Runs `without_threads` where no thread gets a stack, as beyond a limit.
    #[test]
    fn without_threads_work_is_done_here_or_refused_with_the_limit() {
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", "threads::tests::without_threads", "--ignored", "--test-threads=1"]);
        let output = test.env("RUST_MIN_STACK", (1u64 << 50).to_string()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    #[ignore = "run by the test above, in a process that can start no thread"]
    fn without_threads() {
        let error = spawn("a test", || ()).unwrap_err().to_string();
        assert!(error.contains("no thread for a test") && error.contains("ulimit -u"), "{error}");
        let mut items = [1, 2, 3];
        in_parallel(&mut items, 3, |item| *item *= 2);
        assert_eq!(items, [2, 4, 6]);
        let ranks = ThreadRanks::run(2, Duration::from_secs(600), |ranks| ranks.barrier());
        let reasons: Vec<String> = ranks.into_iter().map(|rank| rank.unwrap_err().chain()).collect();
        assert!(reasons.iter().all(|reason| reason.contains("ulimit -u")), "{reasons:?}");
    }
}
