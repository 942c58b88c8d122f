//! [`GradientSink`] across the boundary: called from the threads of a pull.

use std::sync::Arc;

use crate::abi::{RollGradientSinkTable, RollObject};

use super::crossing::crossing;
use super::foreign::ForeignObject;
use super::served::Served;
use super::source::Source;
use super::wire::Argument;
use crate::{GradientSink, Result};

type Sink = Arc<dyn GradientSink>;

crossing! {
    GradientSink for ForeignSink, table RollGradientSinkTable of Sink {
        // A sink that failed accepts nothing; the object it belongs to reports the panic at its next call (P5).
        ref fn deliver(position: usize, gradient: &[f32]) -> bool, or false;
    }
    by hand [] {}
}

type ForeignSink = ForeignObject<RollGradientSinkTable>;

// SAFETY: P4: its function may be called by several threads.
unsafe impl Sync for ForeignSink {}

/// Ownership passes to the other side (P2): a model keeps the sink for later pulls.
impl Argument for Option<Sink> {
    type Wire = RollObject;
    type Lent = Option<Sink>;
    type Received = Option<Sink>;
    type Borrowed<'k> = Option<Sink>;
    fn lend(self) -> Option<Sink> {
        self
    }
    fn wire(lent: &mut Option<Sink>) -> RollObject {
        lent.take().map(|sink| Served::give_part(Box::new(sink), &TABLE)).unwrap_or_default()
    }
    unsafe fn receive(wire: RollObject) -> Result<Option<Sink>> {
        if wire.table.is_null() {
            return Ok(None);
        }
        // SAFETY: P2 and P8.
        Ok(Some(Arc::new(unsafe { ForeignSink::new(wire, Source::Host) }?)))
    }
    fn borrow(received: &mut Option<Sink>) -> Option<Sink> {
        received.take()
    }
}
