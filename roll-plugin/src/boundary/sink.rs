//! [`GradientSink`] across the boundary: called from the threads of a pull.

use std::sync::Arc;

use crate::abi::{RollGradientSinkTable, RollObject};

use super::crossing::{Calls, crossing};
use super::foreign::Foreign;
use super::served::Served;
use super::source::Source;
use super::wire::Argument;
use crate::{GradientSink, Result};

type Sink = Arc<dyn GradientSink>;

crossing! {
    GradientSink for ForeignSink, table RollGradientSinkTable of Sink {
        // One that failed takes nothing; the object that it belongs to answers its next call with the panic (P5).
        ref fn deliver(position: usize, gradient: &[f32]) -> bool, or false;
    }
    by hand [] {}
}

/// A sink that lives on the other side of the boundary; calls go through its table.
pub(super) struct ForeignSink {
    object: Foreign,
    table: RollGradientSinkTable,
}

// SAFETY: P4: its function may be called by several threads.
unsafe impl Sync for ForeignSink {}

impl Calls<RollGradientSinkTable> for ForeignSink {
    fn callee(&self) -> (&Foreign, Option<&RollGradientSinkTable>) {
        (&self.object, Some(&self.table))
    }
}

/// Borrowed away (P2): a model keeps it for the pulls to come.
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
        let (object, table) = unsafe { Foreign::new(wire, Source::Host) }?;
        Ok(Some(Arc::new(ForeignSink { object, table })))
    }
    fn borrow(received: &mut Option<Sink>) -> Option<Sink> {
        received.take()
    }
}
