//! Texts, lists and tensors on their way across.

use std::ffi::c_void;
use std::sync::Arc;

use super::abi::{NO_TENSOR, RollNamedNumber, RollNamedTensor, RollOwned, RollStr, RollTensor};
use crate::{DType, Error, Result, Tensor};

const DTYPES: [DType; 7] = [DType::F32, DType::Bf16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];

/// Most axes that a tensor of the other side may claim.
const MAX_RANK: usize = 16;

/// A slice of the other side's memory. An empty one may have any pointer.
///
/// # Safety
/// `data` points to `len` values that live and do not change for `'a`.
pub(super) unsafe fn slice<'a, T>(data: *const T, len: usize) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() || !data.is_aligned() || len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Error::Misuse(format!("a list of {len} values at {data:p} crossed the plugin boundary")));
    }
    // SAFETY: as the caller promises; null, misaligned and overlong ones were turned away.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

/// As [`slice`], to write into.
///
/// # Safety
/// As [`slice`], and nobody else reads or writes the values for `'a`.
pub(super) unsafe fn slice_mut<'a, T>(data: *mut T, len: usize) -> Result<&'a mut [T]> {
    if len == 0 {
        return Ok(&mut []);
    }
    if data.is_null() || !data.is_aligned() || len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Error::Misuse(format!("a buffer of {len} values at {data:p} crossed the plugin boundary")));
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
}

impl RollStr {
    /// Lends `text`.
    pub const fn lend(text: &str) -> Self {
        Self { data: text.as_ptr(), len: text.len() }
    }

    /// Fails when it is no UTF-8.
    ///
    /// # Safety
    /// As [`slice`].
    pub(super) unsafe fn get<'a>(self) -> Result<&'a str> {
        // SAFETY: as the caller promises.
        let bytes = unsafe { slice(self.data, self.len) }?;
        std::str::from_utf8(bytes).map_err(|e| Error::Misuse(format!("a text that is no UTF-8: {e}")))
    }
}

/// Items and what they point into.
struct Payload<T, K> {
    items: Vec<T>,
    _keep: K,
}

impl<T> RollOwned<T> {
    /// `items`, kept with `keep` until the other side releases them.
    pub(super) fn new<K>(items: Vec<T>, keep: K) -> Self {
        unsafe extern "C" fn release<T, K>(owner: *mut c_void) {
            // SAFETY: made by `into_raw` below, and released once.
            super::call::quietly(|| drop(unsafe { Box::from_raw(owner.cast::<Payload<T, K>>()) }));
        }
        let payload = Box::new(Payload { items, _keep: keep });
        let (items, len) = (payload.items.as_ptr(), payload.items.len());
        Self { items, len, owner: Box::into_raw(payload).cast(), release: Some(release::<T, K>) }
    }

    /// Reads the list with `read` and gives it back.
    ///
    /// # Safety
    /// The list is as the other side made it, and not released yet.
    pub(super) unsafe fn take<R>(self, read: impl FnOnce(&[T]) -> Result<R>) -> Result<R> {
        // SAFETY: the list is valid until its release below.
        let result = unsafe { slice(self.items, self.len) }.and_then(read);
        if let Some(release) = self.release {
            // SAFETY: once, by its receiver.
            unsafe { release(self.owner) };
        }
        result
    }
}

impl RollOwned<u8> {
    pub(super) fn text(text: String) -> Self {
        Self::new(text.into_bytes(), ())
    }

    /// # Safety
    /// As [`RollOwned::take`].
    pub(super) unsafe fn take_text(self) -> Result<String> {
        // SAFETY: as the caller promises.
        unsafe { self.take(|bytes| Ok(String::from_utf8_lossy(bytes).into_owned())) }
    }
}

/// Keeps a tensor of the other side alive.
struct Shared {
    data: *const u8,
    bytes: usize,
    owner: *mut c_void,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
}

// SAFETY: the bytes do not change, and the interface asks that owners may be released on any thread.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        match self.bytes {
            0 => &[],
            // SAFETY: checked when it was made; alive until `release`.
            bytes => unsafe { std::slice::from_raw_parts(self.data, bytes) },
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: this is one owner, and it is released once.
            unsafe { release(self.owner) };
        }
    }
}

unsafe extern "C" fn retain_tensor(owner: *mut c_void) {
    // SAFETY: `owner` came from `Arc::into_raw` in `RollTensor::share`.
    unsafe { Arc::increment_strong_count(owner.cast::<Tensor>().cast_const()) }
}

unsafe extern "C" fn release_tensor(owner: *mut c_void) {
    // SAFETY: as above; each owner is released once.
    super::call::quietly(|| drop(unsafe { Arc::from_raw(owner.cast::<Tensor>().cast_const()) }));
}

/// A tensor lent for one call.
pub(super) struct Lent {
    tensor: RollTensor,
}

impl Lent {
    pub(super) fn new(tensor: &Tensor) -> Self {
        Self { tensor: RollTensor::share(tensor) }
    }

    pub(super) fn get(&self) -> &RollTensor {
        &self.tensor
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: made by `share`, released once.
        unsafe { release_tensor(self.tensor.owner) };
    }
}

impl RollTensor {
    /// An owner of `tensor`'s bytes, without a copy.
    pub(super) fn share(tensor: &Tensor) -> Self {
        let shared = Arc::new(tensor.clone());
        let (data, bytes) = (shared.as_bytes().as_ptr(), shared.as_bytes().len());
        let (shape, rank) = (shared.shape().as_ptr(), shared.shape().len());
        let dtype = DTYPES.iter().position(|d| *d == tensor.dtype()).unwrap_or_default() as u32;
        let owner = Arc::into_raw(shared).cast_mut().cast();
        Self { data, bytes, shape, rank, dtype, owner, retain: Some(retain_tensor), release: Some(release_tensor) }
    }

    /// Takes over a result.
    ///
    /// # Safety
    /// The fields are as the other side made them, and nobody else releases it.
    pub(super) unsafe fn take(self) -> Result<Tensor> {
        let keep = Shared { data: self.data, bytes: self.bytes, owner: self.owner, release: self.release };
        // SAFETY: as the caller promises.
        unsafe { self.with_owner(keep) }
    }

    /// Keeps an argument: shares the bytes when it can be retained, else copies them.
    ///
    /// # Safety
    /// The fields are as the other side made them, and the tensor lives during this call.
    pub(super) unsafe fn keep(&self) -> Result<Tensor> {
        let keep = match self.retain {
            Some(retain) => {
                // SAFETY: the tensor is alive.
                unsafe { retain(self.owner) };
                Shared { data: self.data, bytes: self.bytes, owner: self.owner, release: self.release }
            }
            None => {
                // SAFETY: as the caller promises.
                let copy = unsafe { slice(self.data, self.bytes) }?.to_vec();
                // SAFETY: the fields are as the other side made them.
                let (dtype, shape) = unsafe { self.form() }?;
                return Tensor::from_bytes(dtype, shape, Arc::new(copy));
            }
        };
        // SAFETY: as the caller promises.
        unsafe { self.with_owner(keep) }
    }

    /// As [`RollTensor::share`]; nothing has the dtype [`NO_TENSOR`].
    pub(super) fn share_option(tensor: Option<&Tensor>) -> Self {
        tensor.map_or(Self { dtype: NO_TENSOR, ..Self::default() }, Self::share)
    }

    /// As [`RollTensor::take`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn take_option(self) -> Result<Option<Tensor>> {
        if self.dtype == NO_TENSOR {
            return Ok(None);
        }
        // SAFETY: as the caller promises.
        unsafe { self.take() }.map(Some)
    }

    /// As [`RollTensor::keep`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn keep_option(&self) -> Result<Option<Tensor>> {
        if self.dtype == NO_TENSOR {
            return Ok(None);
        }
        // SAFETY: as the caller promises.
        unsafe { self.keep() }.map(Some)
    }

    /// # Safety
    /// The fields are as the other side made them.
    unsafe fn form(&self) -> Result<(DType, Vec<usize>)> {
        let dtype = *DTYPES
            .get(self.dtype as usize)
            .ok_or_else(|| Error::Misuse(format!("a tensor's dtype is {}, which means nothing", self.dtype)))?;
        if self.rank > MAX_RANK {
            return Err(Error::Misuse(format!("a tensor has {} axes, more than {MAX_RANK}", self.rank)));
        }
        // SAFETY: as the caller promises.
        let shape = unsafe { slice(self.shape, self.rank) }?.to_vec();
        if self.data.is_null() && self.bytes > 0 {
            return Err(Error::Misuse(format!("a tensor of shape {shape:?} has no data")));
        }
        Ok((dtype, shape))
    }

    /// # Safety
    /// As [`RollTensor::form`], and `keep` keeps the bytes.
    unsafe fn with_owner(&self, keep: Shared) -> Result<Tensor> {
        // SAFETY: as the caller promises; an error drops `keep`, which releases.
        let (dtype, shape) = unsafe { self.form() }?;
        Tensor::from_bytes(dtype, shape, Arc::new(keep))
    }
}

/// Named tensors as an owned list.
pub(super) fn own_tensors<'a>(named: impl Iterator<Item = (&'a String, &'a Tensor)>) -> RollOwned<RollNamedTensor> {
    let kept: Vec<(String, Lent)> = named.map(|(name, tensor)| (name.clone(), Lent::new(tensor))).collect();
    let items = lend_named(&kept);
    RollOwned::new(items, Lends(kept))
}

struct Lends(#[allow(dead_code)] Vec<(String, Lent)>);

/// The list for a call; the texts and tensors stay with the caller.
pub(super) fn lend_named(named: &[(String, Lent)]) -> Vec<RollNamedTensor> {
    named.iter().map(|(name, lent)| RollNamedTensor { name: RollStr::lend(name), tensor: *lent.get() }).collect()
}

/// Keeps lent named tensors.
///
/// # Safety
/// The list is as the other side made it and lives during this call.
pub(super) unsafe fn keep_named<M: FromIterator<(String, Tensor)>>(named: &[RollNamedTensor]) -> Result<M> {
    named
        .iter()
        .map(|n| {
            // SAFETY: as the caller promises.
            unsafe { Ok((n.name.get()?.to_string(), n.tensor.keep()?)) }
        })
        .collect()
}

/// Named numbers as an owned list.
pub(super) fn own_numbers<'a>(named: impl Iterator<Item = (&'a String, &'a f64)>) -> RollOwned<RollNamedNumber> {
    let kept: Vec<(String, f64)> = named.map(|(name, value)| (name.clone(), *value)).collect();
    let items = kept.iter().map(|(name, value)| RollNamedNumber { name: RollStr::lend(name), value: *value }).collect();
    RollOwned::new(items, kept)
}

/// Reads named numbers and gives the list back.
///
/// # Safety
/// As [`RollOwned::take`].
pub(super) unsafe fn take_numbers<M: FromIterator<(String, f64)>>(list: RollOwned<RollNamedNumber>) -> Result<M> {
    // SAFETY: as the caller promises.
    unsafe { list.take(|items| items.iter().map(|n| Ok((n.name.get()?.to_string(), n.value))).collect()) }
}

/// Reads named tensors and gives the list back.
///
/// # Safety
/// As [`RollOwned::take`].
pub(super) unsafe fn take_tensors<M: FromIterator<(String, Tensor)>>(list: RollOwned<RollNamedTensor>) -> Result<M> {
    // SAFETY: as the caller promises.
    unsafe { list.take(|items| keep_named(items)) }
}
