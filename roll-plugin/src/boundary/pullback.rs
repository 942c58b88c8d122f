//! Pullbacks across the boundary.

use std::ffi::c_void;
use std::sync::Mutex;

use crate::abi::{RollError, RollPullback, RollTensor, RollValue};

use super::panics::quietly;
use super::served::answer;
use super::source::Source;
use super::tensor::{self, LentTensor};
use super::wire::Answer;
use crate::{Error, Pullback, Result, Tensor};

unsafe extern "C" fn pull(
    state: *mut c_void,
    cotangent: *const RollTensor,
    out: *mut RollTensor,
    error: *mut RollError,
) -> u32 {
    let body = || {
        // SAFETY: P1; `state` came from `give` and is not released yet.
        let (pullback, cotangent) =
            unsafe { (&*state.cast::<Mutex<Option<Pullback>>>(), tensor::receive(&*cotangent)?) };
        let pullback = pullback.lock().ok().and_then(|mut slot| slot.take());
        let pullback = pullback.ok_or_else(|| Error::Misuse("a pullback was called twice".into()))?;
        Ok(tensor::share(&pullback.pull(&cotangent)?))
    };
    // SAFETY: P7.
    unsafe { answer(out, error, body) }
}

unsafe extern "C" fn release(state: *mut c_void) {
    // SAFETY: P2; `state` came from `give`.
    quietly(|| drop(unsafe { Box::from_raw(state.cast::<Mutex<Option<Pullback>>>()) }));
}

pub(super) fn give(pullback: Option<Pullback>) -> RollPullback {
    let Some(pullback) = pullback else { return RollPullback::default() };
    let state = Box::into_raw(Box::new(Mutex::new(Some(pullback)))).cast();
    RollPullback { state, pull: Some(pull), release: Some(release) }
}

/// A pullback of the other side, released when dropped.
struct ForeignPullback(RollPullback);

// SAFETY: P4: it may move between threads.
unsafe impl Send for ForeignPullback {}

impl Drop for ForeignPullback {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: P2.
            unsafe { release(self.0.state) };
        }
    }
}

/// Takes over a pullback.
///
/// # Safety
/// P2.
pub(super) unsafe fn take(given: RollPullback, source: &Source) -> Option<Pullback> {
    let (foreign, source) = (ForeignPullback(given), source.clone());
    let pull = foreign.0.pull?;
    Some(Pullback::new(move |cotangent| {
        // Captures the whole struct, so that the pullback is released when the closure is dropped; otherwise it would
        // copy the pointer `foreign.0.state` alone.
        let foreign = &foreign;
        let (lent, mut out, mut error) = (LentTensor::new(cotangent), RollTensor::default(), RollError::default());
        let _entered = source.entered("pull");
        // SAFETY: P1; the pullback is not released.
        let status = unsafe { pull(foreign.0.state, &lent.get(), &mut out, &mut error) };
        let out = source.outcome("pull", status, out, error)?;
        // SAFETY: P2.
        unsafe { tensor::take(out) }.map_err(|e| source.blame("pull", e))
    }))
}

/// Makes `pullback` fail unless its gradient is f32 and has the shape of `expected`.
pub(super) fn shaped(pullback: Option<Pullback>, expected: &Tensor, source: &Source) -> Option<Pullback> {
    let (expected, source) = (expected.shape().to_vec(), source.clone());
    pullback.map(|pullback| {
        Pullback::new(move |cotangent| {
            let gradient = pullback.pull(cotangent)?;
            let checked = gradient.f32s().map(drop).and_then(|()| match gradient.shape() == expected {
                true => Ok(()),
                false => Err(Error::shape("the gradient", format!("{expected:?}"), gradient.shape())),
            });
            checked.map(|()| gradient).map_err(|e| source.blame("pull", e))
        })
    })
}

/// A value and its pullback.
impl Answer for (Tensor, Option<Pullback>) {
    type Wire = RollValue;
    fn give(self) -> RollValue {
        RollValue { value: tensor::share(&self.0), pullback: give(self.1) }
    }
    unsafe fn take(wire: RollValue, source: &Source) -> Result<Self> {
        // SAFETY: as the caller promises; the pullback first, so that an error of the value releases it.
        let (pullback, value) = unsafe { (take(wire.pullback, source), tensor::take(wire.value)) };
        Ok((value?, pullback))
    }
}
