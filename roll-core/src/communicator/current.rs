//! The ranks that this process, or this thread, is one of.
//!
//! Factories take options, and options cannot hold a communicator; MPI itself is one per process. So the program
//! that starts a job says here which ranks it is one of, and strategies and weight stores ask.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};
use std::thread::LocalKey;

use super::{Communicator, SingleRank};

static PROCESS: OnceLock<Arc<dyn Communicator>> = OnceLock::new();

thread_local! {
    static THREAD: RefCell<Option<Arc<dyn Communicator>>> = const { RefCell::new(None) };
    static TOKENS: RefCell<Option<Arc<dyn Communicator>>> = const { RefCell::new(None) };
}

/// The ranks of this thread ([`within`]), or else of this process ([`set_process`]), or else one rank alone.
pub fn current() -> Arc<dyn Communicator> {
    THREAD.with_borrow(Clone::clone).or_else(|| PROCESS.get().cloned()).unwrap_or_else(|| Arc::new(SingleRank))
}

/// Makes this process one of the ranks of `communicator`, once; a second call changes nothing and returns the
/// communicator.
pub fn set_process(communicator: Arc<dyn Communicator>) -> Result<(), Arc<dyn Communicator>> {
    PROCESS.set(communicator)
}

/// Runs `f` as one of the ranks of `communicator`, on this thread.
pub fn within<T>(communicator: Arc<dyn Communicator>, f: impl FnOnce() -> T) -> T {
    replaced(&THREAD, Some(communicator), f)
}

/// Runs `f`, which makes a model, on this thread: the model divides the tokens of every pass among `ranks`, if there
/// are any ([`crate::Strategy::token_ranks`]).
pub fn dividing_tokens<T>(ranks: Option<Arc<dyn Communicator>>, f: impl FnOnce() -> T) -> T {
    replaced(&TOKENS, ranks, f)
}

/// The ranks among which a model that is made now divides the tokens of every pass. Its [`crate::Model::token_ranks`]
/// says that it does.
pub fn token_ranks() -> Option<Arc<dyn Communicator>> {
    TOKENS.with_borrow(Clone::clone)
}

type Place = LocalKey<RefCell<Option<Arc<dyn Communicator>>>>;

/// Runs `f` while `ranks` are at `place`.
fn replaced<T>(place: &'static Place, ranks: Option<Arc<dyn Communicator>>, f: impl FnOnce() -> T) -> T {
    struct Restore(&'static Place, Option<Arc<dyn Communicator>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            self.0.set(self.1.take());
        }
    }
    let _restore = Restore(place, place.replace(ranks));
    f()
}
