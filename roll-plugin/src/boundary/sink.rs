//! [`GradientSink`] across the boundary: called from the threads of a pull. P1 to P9 are the numbers of the contract in
//! [`crate::abi`].

use std::sync::Arc;

use super::object::{Gift, Remote};
use super::remote::{Argument, remote};
use crate::{GradientSink, Result};

remote! {
    trait GradientSink for RemoteSink {
        // `false`: the gradient was not taken. If the sink panicked, the next call of the strategy that owns the sink
        // fails with the panic's message (P5).
        fn deliver(&self, position: usize, gradient: &[f32]) -> bool else { false };
    }
}

/// A sink of the other side.
pub(super) struct RemoteSink {
    remote: Remote,
}

// SAFETY: P4: several threads may call it.
unsafe impl Sync for RemoteSink {}

type Sink = Arc<dyn GradientSink>;

/// Ownership passes to the other side (P2), because a model keeps the sink for later pulls.
impl Argument for Option<Sink> {
    type Lent = Option<Gift>;
    type Received = Option<Remote>;
    type Opened = Option<Sink>;
    type Borrowed<'k> = Option<Sink>;
    fn lend(self) -> Option<Gift> {
        let sink = self?;
        Some(Gift::part(move |method, message| answer_shared(sink.as_ref(), method, message)))
    }
    fn open(received: Option<Remote>) -> Result<Option<Sink>> {
        Ok(received.map(|remote| Arc::new(RemoteSink { remote }) as Sink))
    }
    fn borrow(opened: &mut Option<Sink>) -> Option<Sink> {
        opened.take()
    }
}
