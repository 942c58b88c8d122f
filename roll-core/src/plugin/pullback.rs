//! Pullbacks across the boundary.

use std::ffi::c_void;
use std::sync::Mutex;

use super::abi::{RollError, RollPullback, RollTensor};
use super::call::{Source, answer, quietly};
use super::data::Lent;
use crate::{Error, Pullback, Result, Tensor};

unsafe extern "C" fn pull(
    state: *mut c_void,
    cotangent: *const RollTensor,
    out: *mut RollTensor,
    error: *mut RollError,
) -> u32 {
    let body = || {
        // SAFETY: `state` came from `give`, is not released yet, and the cotangent is lent for this call.
        let (pullback, cotangent) = unsafe { (&*state.cast::<Mutex<Option<Pullback>>>(), (*cotangent).keep()?) };
        let pullback = pullback.lock().ok().and_then(|mut slot| slot.take());
        let pullback = pullback.ok_or_else(|| Error::Misuse("a pullback was called twice".into()))?;
        Ok(RollTensor::share(&pullback.pull(&cotangent)?))
    };
    // SAFETY: as the interface says.
    unsafe { answer(out, error, body) }
}

unsafe extern "C" fn release(state: *mut c_void) {
    // SAFETY: `state` came from `give`, and is released once.
    quietly(|| drop(unsafe { Box::from_raw(state.cast::<Mutex<Option<Pullback>>>()) }));
}

/// Gives a pullback away.
pub(super) fn give(pullback: Option<Pullback>) -> RollPullback {
    let Some(pullback) = pullback else { return RollPullback::default() };
    let state = Box::into_raw(Box::new(Mutex::new(Some(pullback)))).cast();
    RollPullback { state, pull: Some(pull), release: Some(release) }
}

/// A pullback of the other side, released when dropped.
struct Theirs(RollPullback);

// SAFETY: the interface asks that pullbacks may be moved between threads.
unsafe impl Send for Theirs {}

impl Drop for Theirs {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: ours, and released once.
            unsafe { release(self.0.state) };
        }
    }
}

/// Takes over a pullback. What it gives must have the shape `wanted`, when there is one, and be f32.
///
/// # Safety
/// `given` is as the other side made it, and nobody else's.
pub(super) unsafe fn take(given: RollPullback, source: Source, wanted: Option<Vec<usize>>) -> Option<Pullback> {
    let theirs = Theirs(given);
    theirs.0.pull?;
    Some(Pullback::new(move |cotangent| {
        let result = pull_theirs(&theirs, &source, cotangent)?;
        if let Some(wanted) = wanted {
            check(&result, &wanted).map_err(|e| source.blame("pull", e))?;
        }
        Ok(result)
    }))
}

fn pull_theirs(theirs: &Theirs, source: &Source, cotangent: &Tensor) -> Result<Tensor> {
    let Some(pull) = theirs.0.pull else { return Err(Error::Misuse("there is no pullback".into())) };
    let (lent, mut out, mut error) = (Lent::new(cotangent), RollTensor::default(), RollError::default());
    // SAFETY: the pullback is not released, and the arguments live during the call.
    let status = unsafe { pull(theirs.0.state, lent.get(), &mut out, &mut error) };
    let out = source.outcome("pull", status, out, error)?;
    // SAFETY: the other side answered with a tensor that is ours now.
    unsafe { out.take() }.map_err(|e| source.blame("pull", e))
}

fn check(gradient: &Tensor, wanted: &[usize]) -> Result<()> {
    gradient.f32s()?;
    match gradient.shape() == wanted {
        true => Ok(()),
        false => Err(Error::shape("the gradient", format!("{wanted:?}"), gradient.shape())),
    }
}
