//! The background thread that makes a rank's queued requests, and its queue.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use roll_core::{Error, Result};

use super::{Request, Sequencer};
use crate::sync::lock;

/// Number of values in queued contributions above which [`Queue::push`] blocks. A contribution larger than that is
/// queued when no other request is.
const CAPACITY: usize = 1 << 24;

/// A request that waits for its turn on the background thread.
pub(super) struct QueuedRequest {
    pub(super) request: Request,
    pub(super) contribution: Vec<f32>,
    /// Receives the result, on the background thread. An error that it returns is reported by the next call.
    pub(super) on_result: Box<dyn FnOnce(Result<Vec<f32>>) -> Result<()> + Send>,
}

impl QueuedRequest {
    pub(super) fn run(self, sequencer: &Sequencer) -> Result<()> {
        let result = sequencer.request(self.request, &self.contribution);
        drop(self.contribution);
        (self.on_result)(result)
    }
}

/// The queue of requests, first in, first out.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    queued: VecDeque<QueuedRequest>,
    /// Number of values in the contributions of queued requests and of the one in progress.
    queued_values: usize,
    /// Whether a request is in progress.
    is_working: bool,
    /// Whether the thread has been started.
    is_started: bool,
    /// The first error that has not been reported.
    unreported_error: Option<Error>,
    /// Whether the thread is to end.
    is_closed: bool,
}

impl Queue {
    /// Queues a request; blocks while there is no room. Starts the thread at the first request. Fails with an earlier
    /// error that has not been reported.
    pub(super) fn push(self: &Arc<Self>, sequencer: &Arc<Sequencer>, queued: QueuedRequest) -> Result<()> {
        let mut state = lock(&self.state);
        while !state.queued.is_empty() && state.queued_values + queued.contribution.len() > CAPACITY {
            state = self.wait(state);
        }
        if let Some(error) = state.unreported_error.take() {
            return Err(error);
        }
        if !state.is_started {
            let (queue, sequencer) = (self.clone(), sequencer.clone());
            std::thread::Builder::new()
                .name("roll-ranks".into())
                .spawn(move || queue.work(&sequencer))
                .map_err(|e| Error::Misuse(format!("starting the thread that talks to the other ranks: {e}")))?;
            state.is_started = true;
        }
        state.queued_values += queued.contribution.len();
        state.queued.push_back(queued);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until the queue is empty and no request is in progress. Fails with the first error that has not been
    /// reported.
    pub(super) fn wait_idle(&self) -> Result<()> {
        let mut state = lock(&self.state);
        while state.is_working || !state.queued.is_empty() {
            state = self.wait(state);
        }
        match state.unreported_error.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Stops the thread after its current request. Queued requests are dropped, and with them the senders of their
    /// results, so that receivers get an error.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        state.queued.clear();
        self.changed.notify_all();
    }

    /// Makes requests until the queue is closed.
    fn work(&self, sequencer: &Sequencer) {
        let mut state = lock(&self.state);
        loop {
            let Some(queued) = state.queued.pop_front() else {
                if state.is_closed {
                    return;
                }
                state = self.wait(state);
                continue;
            };
            state.is_working = true;
            drop(state);
            let values = queued.contribution.len();
            let result = catch_unwind(AssertUnwindSafe(|| queued.run(sequencer)))
                .unwrap_or_else(|_| Err(Error::Misuse("the thread that talks to other ranks panicked".into())));
            state = lock(&self.state);
            state.is_working = false;
            state.queued_values = state.queued_values.saturating_sub(values);
            // The first error is the cause; later ones only report that the job is over.
            if state.unreported_error.is_none() {
                state.unreported_error = result.err();
            }
            self.changed.notify_all();
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, QueueState>) -> MutexGuard<'a, QueueState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}
