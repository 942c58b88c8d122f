//! Reads memory of the other side, and passes memory to it.

use std::ffi::c_void;

use crate::abi::{RollList, RollOwned, RollStr};

use super::panics::quietly;
use crate::{Error, Result};

fn impossible(what: &str, len: usize, at: *const u8) -> Error {
    Error::Misuse(format!("a {what} of {len} values at {at:p} crossed the plugin boundary"))
}

/// A slice of the other side's memory. An empty one may have any pointer (P9).
///
/// # Safety
/// `data` points to `len` values that live and do not change for `'a`.
pub(super) unsafe fn slice<'a, T>(data: *const T, len: usize) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() || !data.is_aligned() || len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(impossible("list", len, data.cast()));
    }
    // SAFETY: as the caller promises; null, misaligned and overlong ones were rejected.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

/// As [`slice`], of a list that is lent.
///
/// # Safety
/// P1 and P9; the list lives for `'a`.
pub(super) unsafe fn list<'a, T>(list: RollList<T>) -> Result<&'a [T]> {
    // SAFETY: as the caller promises.
    unsafe { slice(list.items, list.len) }
}

/// A text of the other side. Fails if it is not UTF-8.
///
/// # Safety
/// As [`list`].
pub(super) unsafe fn text<'a>(text: RollStr) -> Result<&'a str> {
    // SAFETY: as the caller promises.
    let bytes = unsafe { slice(text.data, text.len) }?;
    std::str::from_utf8(bytes).map_err(|e| Error::Misuse(format!("a text that is not UTF-8: {e}")))
}

/// Items and the memory that they point into.
struct OwnedList<T, K> {
    items: Vec<T>,
    _keep: K,
}

/// Passes `items` to the other side, which releases them together with `keep` (P2).
pub(super) fn own<T, K>(items: Vec<T>, keep: K) -> RollOwned<T> {
    unsafe extern "C" fn release<T, K>(owner: *mut c_void) {
        // SAFETY: P2, and made by `into_raw` below.
        quietly(|| drop(unsafe { Box::from_raw(owner.cast::<OwnedList<T, K>>()) }));
    }
    let payload = Box::new(OwnedList { items, _keep: keep });
    let (items, len) = (payload.items.as_ptr(), payload.items.len());
    RollOwned { items, len, owner: Box::into_raw(payload).cast(), release: Some(release::<T, K>) }
}

pub(super) fn own_text(text: String) -> RollOwned<u8> {
    own(text.into_bytes(), ())
}

/// Reads a list with `read` and releases it.
///
/// # Safety
/// P2 and P9.
pub(super) unsafe fn take<T, R>(list: RollOwned<T>, read: impl FnOnce(&[T]) -> Result<R>) -> Result<R> {
    // SAFETY: the list is valid until its release below.
    let result = unsafe { slice(list.items, list.len) }.and_then(read);
    if let Some(release) = list.release {
        // SAFETY: P2.
        unsafe { release(list.owner) };
    }
    result
}

/// # Safety
/// As [`take`].
pub(super) unsafe fn take_text(text: RollOwned<u8>) -> Result<String> {
    // SAFETY: as the caller promises.
    unsafe { take(text, |bytes| Ok(String::from_utf8_lossy(bytes).into_owned())) }
}
