//! The calling side: objects of the other side, whose errors name the plugin.

use std::ffi::c_void;

use crate::abi::{Grows, RollError, RollObject};

use super::source::Source;
use super::wire::Answer;
use crate::{Error, Result};

/// An object of the other side that has the functions of `Table`.
pub(super) trait Calls<Table> {
    /// The object and its table; `None` if it has no such table.
    fn callee(&self) -> (&Foreign, Option<&Table>);
}

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

    /// Calls a function with `call`, which adds the arguments. Returns `None` if the other side lacks the function.
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

    /// As [`Foreign::call`], for a function that takes nothing.
    pub(super) fn ask<R: Answer>(
        &self,
        name: &'static str,
        function: Option<unsafe extern "C" fn(*mut c_void, *mut R::Wire, *mut RollError) -> u32>,
    ) -> Result<Option<R>> {
        self.call(name, function, |function, state, out, error| {
            // SAFETY: P7; the rest was promised to `new`.
            unsafe { function(state, out, error) }
        })
    }

    /// The answer of a mandatory function; fails if the other side lacks it.
    pub(super) fn must<R>(&self, name: &'static str, answer: Option<R>) -> Result<R> {
        answer.ok_or_else(|| self.source.blame(name, Error::Misuse(format!("it has no function `{name}`"))))
    }

    /// Adds the plugin's name to an error found in its answer.
    pub(super) fn blame<R>(&self, call: &'static str, result: Result<R>) -> Result<R> {
        result.map_err(|e| self.source.blame(call, e))
    }
}

/// An object of the other side with the functions of one table, and its facts that do not change.
pub(super) struct ForeignObject<Table, Facts = ()> {
    pub(super) facts: Facts,
    pub(super) object: Foreign,
    pub(super) table: Table,
}

impl<Table: Grows> ForeignObject<Table> {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let (object, table) = unsafe { Foreign::new(object, source) }?;
        Ok(Self { facts: (), object, table })
    }
}

impl<Table, Facts> Calls<Table> for ForeignObject<Table, Facts> {
    fn callee(&self) -> (&Foreign, Option<&Table>) {
        (&self.object, Some(&self.table))
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
