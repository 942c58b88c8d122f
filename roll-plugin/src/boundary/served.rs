//! The called side: catches panics and converts errors to text.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::{FAULT_FAILURE, FAULT_INTERRUPT, FAULT_NOTHING, FAULT_USER, OK, RollError, RollObject};

use super::error::ErrorChain;
use super::memory::own_text;
use super::panics::{catch, quietly};
use crate::{Error, Fault, Result};

/// Runs `f` for the other side.
///
/// # Safety
/// P7.
pub(super) unsafe fn answer<R>(out: *mut R, error: *mut RollError, f: impl FnOnce() -> Result<R>) -> u32 {
    let result = catch(f).unwrap_or_else(|panic| Err(Error::Misuse(panic)));
    match result {
        Ok(value) => {
            // SAFETY: P7.
            unsafe { out.write(value) };
            OK
        }
        Err(problem) => {
            let fault = match problem.fault() {
                _ if problem.missing_reason().is_some() => FAULT_NOTHING,
                Fault::User => FAULT_USER,
                Fault::Failure => FAULT_FAILURE,
                Fault::Interrupt => FAULT_INTERRUPT,
            };
            // SAFETY: P7.
            unsafe { error.write(RollError { fault, text: own_text(ErrorChain::write(&problem)) }) };
            1
        }
    }
}

/// Message of an object's panic. Its state may be half changed, so it is not called again (P5).
#[derive(Clone, Default)]
struct Poison(Arc<Mutex<Option<String>>>);

impl Poison {
    fn set(&self, panic: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic.into());
    }

    fn check(&self) -> Result<()> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(panic) => Err(Error::Misuse(format!("it is not called again because of an earlier panic: {panic}"))),
        }
    }
}

thread_local! {
    /// Poison flag of the object that this thread serves now.
    static SERVING: RefCell<Option<Poison>> = const { RefCell::new(None) };
}

/// An object that the other side calls.
pub(super) struct Served<T: ?Sized> {
    target: *mut T,
    owned: bool,
    poison: Poison,
}

impl<T: ?Sized> Served<T> {
    /// Passes `target` to the other side (P2).
    pub(super) fn give<Table>(target: Box<T>, table: &'static Table) -> RollObject {
        Self::give_with(target, table, Poison::default())
    }

    /// As [`Served::give`], for a part of the object that this thread serves: a panic of the part also poisons the object.
    pub(super) fn give_part<Table>(target: Box<T>, table: &'static Table) -> RollObject {
        Self::give_with(target, table, SERVING.with_borrow(Clone::clone).unwrap_or_default())
    }

    fn give_with<Table>(target: Box<T>, table: &'static Table, poison: Poison) -> RollObject {
        unsafe extern "C" fn release<T: ?Sized>(state: *mut c_void) {
            // SAFETY: P2, and made by `into_raw` below.
            quietly(|| drop(unsafe { Box::from_raw(state.cast::<Served<T>>()) }));
        }
        let served = Box::new(Self { target: Box::into_raw(target), owned: true, poison });
        let table = std::ptr::from_ref(table).cast();
        RollObject { state: Box::into_raw(served).cast(), table, release: Some(release::<T>) }
    }

    /// Lends `target` (P1): the object is good as long as the result lives and is not moved.
    pub(super) fn lend(target: *mut T) -> Self {
        Self { target, owned: false, poison: Poison::default() }
    }

    pub(super) fn object<Table>(&self, table: &'static Table) -> RollObject {
        let state = std::ptr::from_ref(self).cast_mut().cast();
        RollObject { state, table: std::ptr::from_ref(table).cast(), release: None }
    }
}

impl<T: ?Sized> Drop for Served<T> {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: it came from a box, in `give_with`.
            drop(unsafe { Box::from_raw(self.target) });
        }
    }
}

/// Defines the loan of an object of a trait: the other side may call it during one call (P1).
macro_rules! lent {
    ($name:ident: $trait:ident) => {
        /// An object that is lent to the other side for a call.
        pub(super) struct $name($crate::boundary::served::Served<dyn $trait>);

        impl $name {
            pub(super) fn new<'a>(object: &'a mut (dyn $trait + 'a)) -> Self {
                // SAFETY: P1: the caller drops the loan before the borrow ends.
                unsafe { Self::at(object) }
            }

            /// # Safety
            /// The object outlives the result.
            unsafe fn at<'a>(object: *mut (dyn $trait + 'a)) -> Self {
                // SAFETY: only the lifetime changes, and the caller ensures that the object lives long enough.
                let object = unsafe { std::mem::transmute::<*mut (dyn $trait + 'a), *mut dyn $trait>(object) };
                Self($crate::boundary::served::Served::lend(object))
            }

            pub(super) fn object(&self) -> RollObject {
                self.0.object(&TABLE)
            }
        }
    };
}
pub(super) use lent;

/// Runs `f` on the object for the other side. After a panic the object is not called again.
///
/// # Safety
/// `state` is a [`Served`] of `T` (P8) that no other thread calls meanwhile (P4); P7.
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
        served.poison.check()?;
        // Calls may nest: an object that is served may call another one.
        let outer = SERVING.replace(Some(served.poison.clone()));
        let result = catch(|| f(served.target));
        SERVING.set(outer);
        result.unwrap_or_else(|panic| {
            served.poison.set(&panic);
            Err(Error::Misuse(panic))
        })
    };
    // SAFETY: as the caller promises.
    unsafe { answer(out, error, body) }
}
