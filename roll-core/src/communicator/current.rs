//! The ranks that this process, or this thread, is one of.
//!
//! Factories take options, and options cannot hold a communicator; MPI itself is one per process. So the program
//! that starts a job says here which ranks it is one of, and strategies and weight stores ask.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use super::{Communicator, SingleRank};

static PROCESS: OnceLock<Arc<dyn Communicator>> = OnceLock::new();

thread_local! {
    static THREAD: RefCell<Option<Arc<dyn Communicator>>> = const { RefCell::new(None) };
}

/// The ranks of this thread ([`within`]), or else of this process ([`set_process`]), or else one rank alone.
pub fn current() -> Arc<dyn Communicator> {
    THREAD.with_borrow(Clone::clone).or_else(|| PROCESS.get().cloned()).unwrap_or_else(|| Arc::new(SingleRank))
}

/// Makes this process one of the ranks of `communicator`, once; a second call changes nothing and gives it back.
pub fn set_process(communicator: Arc<dyn Communicator>) -> Result<(), Arc<dyn Communicator>> {
    PROCESS.set(communicator)
}

/// Runs `f` as one of the ranks of `communicator`, on this thread.
pub fn within<T>(communicator: Arc<dyn Communicator>, f: impl FnOnce() -> T) -> T {
    struct Restore(Option<Arc<dyn Communicator>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            THREAD.set(self.0.take());
        }
    }
    let _restore = Restore(THREAD.replace(Some(communicator)));
    f()
}
