//! The side that calls: errors come back and say whose they are.

use std::ffi::c_void;

use crate::abi::{Grows, RollError, RollObject};

use super::source::Source;
use super::wire::Answer;
use crate::{Error, Result};

/// An object of the other side, released when dropped.
pub(super) struct Foreign {
    object: RollObject,
    pub(super) source: Source,
}

// SAFETY: P4: it may move between threads, as the traits do (`Send`).
unsafe impl Send for Foreign {}

impl Foreign {
    /// Takes over an object with the table of its functions. Fails if there is no table.
    ///
    /// # Safety
    /// The object is ours (P2), or lent (P1) and outlives the result; its kind is that of `Table` (P8).
    pub(super) unsafe fn new<Table: Grows>(object: RollObject, source: Source) -> Result<(Self, Table)> {
        let own = Self { object, source };
        // SAFETY: as the caller promises; an error drops `own`, which releases.
        let table = unsafe { own.source.table("make", object.table) }?;
        Ok((own, table))
    }

    /// Calls a function with `call`, which adds the arguments. `None`: the other side does not have it.
    pub(super) fn call<F, R: Answer>(
        &self,
        name: &'static str,
        function: Option<F>,
        call: impl FnOnce(F, *mut c_void, *mut R::Wire, *mut RollError) -> u32,
    ) -> Result<Option<R>> {
        let Some(function) = function else { return Ok(None) };
        let (mut out, mut error) = (R::Wire::default(), RollError::default());
        let _entered = self.source.entered(name);
        let status = call(function, self.object.state, &mut out, &mut error);
        let out = self.source.outcome(name, status, out, error)?;
        // SAFETY: P2: the call succeeded, so the answer is ours.
        self.blame(name, unsafe { R::take(out, &self.source) }).map(Some)
    }

    /// The answer of a function that every object of its kind has.
    pub(super) fn must<R>(&self, name: &'static str, answer: Option<R>) -> Result<R> {
        answer.ok_or_else(|| self.source.blame(name, Error::Misuse(format!("it has no function `{name}`"))))
    }

    /// Adds the plugin's name to an error found in its answer.
    pub(super) fn blame<R>(&self, call: &'static str, result: Result<R>) -> Result<R> {
        result.map_err(|e| self.source.blame(call, e))
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(release) = self.object.release {
            let _entered = self.source.entered("release");
            // SAFETY: P2.
            unsafe { release(self.object.state) };
        }
    }
}
