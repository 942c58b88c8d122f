//! The background thread that runs a rank's collectives.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use roll_core::{Error, Result};

use super::{Line, Wish};

/// Number of queued values above which [`Queue::push`] blocks. A single offer is always accepted, however large.
const ROOM: usize = 1 << 24;

/// A callback that receives a result, on the background thread.
pub type Then = Box<dyn FnOnce(Result<Vec<f32>>) + Send>;

/// A queued request.
pub(super) struct Waiting {
    pub(super) wish: Wish,
    pub(super) offer: Vec<f32>,
    pub(super) then: Option<Then>,
}

/// The queue of requests, first in, first out.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    /// Number of values in the queued offers.
    values: usize,
    /// Whether a request is in progress.
    working: bool,
    /// Whether the thread was started.
    started: bool,
    /// The first error of work without a [`Then`].
    failed: Option<Error>,
    closed: bool,
}

impl Queue {
    /// Queues a request; blocks while there is no room. Starts the thread at the first request. Fails with an earlier
    /// error of work without a [`Then`].
    pub(super) fn push(self: &Arc<Self>, line: &Arc<Line>, waiting: Waiting) -> Result<()> {
        let mut state = self.lock();
        while !state.waiting.is_empty() && state.values + waiting.offer.len() > ROOM {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        if !state.started {
            let (queue, line) = (self.clone(), line.clone());
            std::thread::Builder::new()
                .name("roll-ranks".into())
                .spawn(move || queue.work(&line))
                .map_err(|e| Error::Misuse(format!("starting the thread that talks to the other ranks: {e}")))?;
            state.started = true;
        }
        state.values += waiting.offer.len();
        state.waiting.push_back(waiting);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until the queue is empty and no request is in progress. Fails with the first error of work without a
    /// [`Then`].
    pub(super) fn idle(&self) -> Result<()> {
        let mut state = self.lock();
        while state.working || !state.waiting.is_empty() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failed.take().map_or(Ok(()), Err)
    }

    /// Stops the thread after its current request. Queued requests are dropped, and with them their [`Then`], so that a
    /// receiver on a channel of theirs gets an error.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.waiting.clear();
        self.changed.notify_all();
    }

    fn work(&self, line: &Line) {
        let mut state = self.lock();
        loop {
            let Some(Waiting { wish, offer, then }) = state.waiting.pop_front() else {
                if state.closed {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.working = true;
            drop(state);
            let values = offer.len();
            let left = catch_unwind(AssertUnwindSafe(|| {
                let result = line.ask(wish, &offer);
                drop(offer);
                match then {
                    Some(then) => {
                        then(result);
                        None
                    }
                    None => result.err(),
                }
            }));
            let left =
                left.unwrap_or_else(|_| Some(Error::Misuse("the thread that talks to other ranks panicked".into())));
            state = self.lock();
            state.working = false;
            state.values = state.values.saturating_sub(values);
            // The first error is the cause; later ones only report that the job is over.
            if state.failed.is_none() {
                state.failed = left;
            }
            self.changed.notify_all();
        }
    }

    /// Locks the state, even if it is poisoned: it is consistent at every moment.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
