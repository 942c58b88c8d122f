//! Calls across the boundary. The called side catches panics and turns errors into text ([`serve`]); the calling side
//! turns them back and says whose they are ([`Foreign`]).

use std::cell::RefCell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::abi::{FAULT_FAILURE, FAULT_INTERRUPT, FAULT_USER, OK, RollError, RollObject, RollOwned};
use super::error::{Chain, PluginError};
use crate::{Error, Fault, Fingerprint, Result};

thread_local! {
    /// Message and place of this thread's last panic, from the hook.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics leave their message and place for [`catch`] instead of printing them. A plugin has a standard library
/// of its own, so this changes the plugin's panics and not the host's.
pub(super) fn remember_panics() {
    std::panic::set_hook(Box::new(|info| {
        let message = info.to_string();
        tracing::debug!("{message}");
        LAST_PANIC.with_borrow_mut(|last| *last = Some(message));
    }));
}

/// Runs `f`; a panic is an error that says what it said.
fn catch<R>(f: impl FnOnce() -> R) -> std::result::Result<R, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        let said = payload.downcast_ref::<&str>().map(|s| s.to_string());
        let said = said.or_else(|| payload.downcast_ref::<String>().cloned());
        // Dropping a payload may panic again.
        std::mem::forget(payload);
        let hooked = LAST_PANIC.with_borrow_mut(Option::take).map(|m| m.replace('\n', " "));
        hooked.or(said.map(|s| format!("panicked: {s}"))).unwrap_or_else(|| "panicked".into())
    })
}

/// For what must not fail: a panic is logged.
pub(super) fn quietly(f: impl FnOnce()) {
    if let Err(message) = catch(f) {
        tracing::error!("while giving something back across the plugin boundary: {message}");
    }
}

/// Runs `f` for the other side.
///
/// # Safety
/// `out` and `error` may be written.
pub(super) unsafe fn answer<R>(out: *mut R, error: *mut RollError, f: impl FnOnce() -> Result<R>) -> u32 {
    let result = catch(f).unwrap_or_else(|panic| Err(Error::Misuse(panic)));
    match result {
        Ok(value) => {
            // SAFETY: as the caller promises; what was there is plain data.
            unsafe { out.write(value) };
            OK
        }
        Err(problem) => {
            let fault = match problem.fault() {
                Fault::User => FAULT_USER,
                Fault::Failure => FAULT_FAILURE,
                Fault::Interrupt => FAULT_INTERRUPT,
            };
            // SAFETY: as above.
            unsafe { error.write(RollError { fault, text: RollOwned::text(Chain::write(&problem)) }) };
            1
        }
    }
}

/// An object that the other side calls.
pub(super) struct Served<T: ?Sized> {
    target: *mut T,
    owned: bool,
    /// What it said when it panicked. Its state may be half changed, so it is not called again.
    poisoned: Mutex<Option<String>>,
}

impl<T: ?Sized> Served<T> {
    fn new(target: *mut T, owned: bool) -> Self {
        Self { target, owned, poisoned: Mutex::new(None) }
    }

    /// Gives `target` away.
    pub(super) fn give<Table>(target: Box<T>, table: &'static Table) -> RollObject {
        unsafe extern "C" fn release<T: ?Sized>(state: *mut c_void) {
            // SAFETY: made by `into_raw` below, and released once.
            quietly(|| drop(unsafe { Box::from_raw(state.cast::<Served<T>>()) }));
        }
        let served = Box::new(Self::new(Box::into_raw(target), true));
        let table = std::ptr::from_ref(table).cast();
        RollObject { state: Box::into_raw(served).cast(), table, release: Some(release::<T>) }
    }

    /// Lends `target`: the object is good as long as the result lives and is not moved.
    pub(super) fn lend(target: *mut T) -> Self {
        Self::new(target, false)
    }

    fn poison(&self) -> MutexGuard<'_, Option<String>> {
        self.poisoned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn object<Table>(&self, table: &'static Table) -> RollObject {
        let state = std::ptr::from_ref(self).cast_mut().cast();
        RollObject { state, table: std::ptr::from_ref(table).cast(), release: None }
    }
}

impl<T: ?Sized> Drop for Served<T> {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: it came from a box, in `give`.
            drop(unsafe { Box::from_raw(self.target) });
        }
    }
}

/// Runs `f` on the object for the other side. After a panic the object is not called again.
///
/// # Safety
/// `state` is a [`Served`] of `T` that nobody else is calling; `out` and `error` may be written.
pub(super) unsafe fn serve<T: ?Sized, R>(
    state: *mut c_void,
    out: *mut R,
    error: *mut RollError,
    f: impl FnOnce(&mut T) -> Result<R>,
) -> u32 {
    // SAFETY: as the caller promises.
    unsafe { serve_pointer(state, out, error, |target: *mut T| f(&mut *target)) }
}

/// As [`serve`], for functions that may be called from several threads at once.
///
/// # Safety
/// As [`serve`], but others may be calling functions that are served as shared.
pub(super) unsafe fn serve_shared<T: ?Sized, R>(
    state: *mut c_void,
    out: *mut R,
    error: *mut RollError,
    f: impl FnOnce(&T) -> Result<R>,
) -> u32 {
    // SAFETY: as the caller promises.
    unsafe { serve_pointer(state, out, error, |target: *mut T| f(&*target)) }
}

/// # Safety
/// As [`serve`] or [`serve_shared`], by what `f` does with the pointer.
unsafe fn serve_pointer<T: ?Sized, R>(
    state: *mut c_void,
    out: *mut R,
    error: *mut RollError,
    f: impl FnOnce(*mut T) -> Result<R>,
) -> u32 {
    let body = || {
        // SAFETY: as the caller promises.
        let served = unsafe { &*state.cast::<Served<T>>() };
        // The lock is not held while the object works: it may call back.
        if let Some(panic) = &*served.poison() {
            let problem = format!("it is not called again because of an earlier panic: {panic}");
            return Err(Error::Misuse(problem));
        }
        catch(|| f(served.target)).unwrap_or_else(|panic| {
            *served.poison() = Some(panic.clone());
            Err(Error::Misuse(panic))
        })
    };
    // SAFETY: as the caller promises.
    unsafe { answer(out, error, body) }
}

/// Whose object it is, for messages.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Host,
    Plugin(Arc<Origin>),
}

/// Name and file of a plugin.
#[derive(Debug)]
pub(super) struct Origin {
    pub(super) plugin: String,
    pub(super) path: PathBuf,
}

impl Source {
    /// `problem` with the plugin's name, file and method before it.
    pub(super) fn blame(&self, call: &'static str, problem: Error) -> Error {
        match self {
            Self::Host => problem,
            Self::Plugin(_) if matches!(problem, Error::Interrupted) => problem,
            Self::Plugin(origin) => {
                let fault = problem.fault();
                let (plugin, path) = (origin.plugin.clone(), origin.path.clone());
                Error::component(fault, PluginError::Call { plugin, path, call, source: Box::new(problem) })
            }
        }
    }

    /// A key of something kept, as the other side told it. That of a plugin holds its library too: other code may give
    /// something else.
    ///
    /// # Safety
    /// The text is ours, and taken once.
    pub(super) unsafe fn key(&self, call: &'static str, told: RollOwned<u8>) -> Result<Option<String>> {
        // SAFETY: as the caller promises.
        let own = unsafe { told.take_text() }.map_err(|e| self.blame(call, e))?;
        match (self, own.is_empty()) {
            (_, true) => Ok(None),
            (Self::Host, false) => Ok(Some(own)),
            (Self::Plugin(origin), false) => {
                let key = Fingerprint::new("plugin").text("key", own).whole_file(&origin.path)?;
                Ok(Some(key.finish()))
            }
        }
    }

    /// The outcome of a call that the other side answered.
    pub(super) fn outcome<R>(&self, call: &'static str, status: u32, out: R, error: RollError) -> Result<R> {
        if status == OK {
            return Ok(out);
        }
        let fault = match error.fault {
            FAULT_INTERRUPT => return Err(Error::Interrupted),
            FAULT_USER => Fault::User,
            _ => Fault::Failure,
        };
        // SAFETY: the other side filled it in, and it is taken once.
        let text = unsafe { error.text.take_text() }.unwrap_or_default();
        Err(self.blame(call, Error::component(fault, Chain::parse(&text))))
    }
}

/// An object of the other side.
pub(super) struct Foreign<Table: 'static> {
    object: RollObject,
    table: *const Table,
    pub(super) source: Source,
}

// SAFETY: the interface asks that objects may be moved between threads, as the traits do (`Send`).
unsafe impl<Table> Send for Foreign<Table> {}

impl<Table> Foreign<Table> {
    /// Takes over an object. Fails when it has no functions.
    ///
    /// # Safety
    /// `object` is of the kind that `Table` belongs to, made by the other side, and nobody else's. An object that is
    /// lent outlives the result.
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        let table: *const Table = object.table.cast();
        if table.is_null() || !table.is_aligned() {
            return Err(source.blame("make", Error::Misuse("it made an object without functions".into())));
        }
        Ok(Self { object, table, source })
    }

    /// Calls a method.
    pub(super) fn call<R: Default>(
        &self,
        name: &'static str,
        method: impl FnOnce(&Table, *mut c_void, *mut R, *mut RollError) -> u32,
    ) -> Result<R> {
        let (mut out, mut error) = (R::default(), RollError::default());
        // SAFETY: checked in `new`; libraries are never unloaded.
        let table = unsafe { &*self.table };
        let status = method(table, self.object.state, &mut out, &mut error);
        self.source.outcome(name, status, out, error)
    }

    /// Calls a method without a result.
    pub(super) fn run(
        &self,
        name: &'static str,
        method: impl FnOnce(&Table, *mut c_void, *mut RollError) -> u32,
    ) -> Result<()> {
        self.call(name, |table, state, _: *mut (), error| method(table, state, error))
    }

    /// Adds the plugin's name to an error found in what it returned.
    pub(super) fn blame<R>(&self, call: &'static str, result: Result<R>) -> Result<R> {
        result.map_err(|e| self.source.blame(call, e))
    }
}

impl<Table> Drop for Foreign<Table> {
    fn drop(&mut self) {
        if let Some(release) = self.object.release {
            // SAFETY: ours, and released once.
            unsafe { release(self.object.state) };
        }
    }
}
