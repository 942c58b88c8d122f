//! Reads memory of the other side: checks pointers and lengths before it makes slices and texts of them. P9 is a number
//! of the contract in [`crate::abi`].

use crate::abi::RollStr;
use crate::{Error, Result};

/// The error of a list or text that cannot be memory of the other side.
fn impossible(what: &str, len: usize, at: *const u8) -> Error {
    Error::Misuse(format!("a {what} of {len} values at {at:p} crossed the plugin boundary"))
}

/// A slice of the other side's memory. Fails on a null or misaligned pointer and on an impossible length. An empty
/// slice may have any pointer (P9).
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
    // SAFETY: as the caller promises; null, misaligned and overlong slices were rejected.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

/// A text of the other side. Fails if it is not UTF-8.
///
/// # Safety
/// As [`slice`].
pub(super) unsafe fn text<'a>(text: RollStr) -> Result<&'a str> {
    // SAFETY: as the caller promises.
    let bytes = unsafe { slice(text.data, text.len) }?;
    std::str::from_utf8(bytes).map_err(|e| Error::Misuse(format!("a text that is not UTF-8: {e}")))
}
