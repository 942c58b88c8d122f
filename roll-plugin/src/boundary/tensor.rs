//! Tensors across the boundary. Their bytes are shared, and copied only if a tensor cannot be retained. P1 to P9 are
//! the numbers of the contract in [`crate::abi`].

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::RollTensor;

use super::memory::slice;
use super::panics::quietly;
use crate::{DType, Error, Result, Tensor};

/// The dtypes, by their numbers at the boundary.
const DTYPES: [DType; 7] = [DType::F32, DType::Bf16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];

/// The number of f32 among [`DTYPES`].
const F32: u32 = 0;

/// Maximum number of axes of a tensor of the other side; a larger number is garbage.
const MAX_RANK: usize = 16;

/// The bytes of a tensor of the other side, of which this value is one owner.
struct ForeignBytes(RollTensor);

// SAFETY: P2: it may be released on any thread, and until then the bytes do not change.
unsafe impl Send for ForeignBytes {}
// SAFETY: as above.
unsafe impl Sync for ForeignBytes {}

impl AsRef<[u8]> for ForeignBytes {
    fn as_ref(&self) -> &[u8] {
        match self.0.bytes {
            0 => &[],
            // SAFETY: `dtype_and_shape` has checked address and length; the bytes are alive until `release`.
            bytes => unsafe { std::slice::from_raw_parts(self.0.data, bytes) },
        }
    }
}

impl Drop for ForeignBytes {
    fn drop(&mut self) {
        // SAFETY: P2: this value is an owner.
        unsafe { release(&self.0) };
    }
}

/// Gives up one owner of a tensor.
///
/// # Safety
/// P2: the caller is an owner.
pub(super) unsafe fn release(tensor: &RollTensor) {
    if let Some(release) = tensor.release {
        // SAFETY: as the caller promises.
        unsafe { release(tensor.owner) };
    }
}

unsafe extern "C" fn retain_tensor(owner: *mut c_void) {
    // SAFETY: `owner` came from `Arc::into_raw` in `share`.
    unsafe { Arc::increment_strong_count(owner.cast::<Tensor>().cast_const()) }
}

unsafe extern "C" fn release_tensor(owner: *mut c_void) {
    // SAFETY: as above; P2.
    quietly(|| drop(unsafe { Arc::from_raw(owner.cast::<Tensor>().cast_const()) }));
}

/// A tensor for the other side that shares the bytes of `tensor`, which nobody writes to. The result is one owner of
/// these bytes, and must be released.
pub(super) fn share(tensor: &Tensor) -> RollTensor {
    let shared = Arc::new(tensor.clone());
    let (data, bytes) = (shared.as_bytes().as_ptr().cast_mut(), shared.as_bytes().len());
    let (shape, rank) = (shared.shape().as_ptr(), shared.shape().len());
    let dtype = DTYPES.iter().position(|d| *d == tensor.dtype()).unwrap_or_default() as u32;
    let owner = Arc::into_raw(shared).cast_mut().cast();
    RollTensor { data, bytes, shape, rank, dtype, owner, retain: Some(retain_tensor), release: Some(release_tensor) }
}

/// A tensor for the other side that lends it a list for one call. The tensor points to `shape`, its one-axis shape,
/// which must live until the call is over.
pub(super) fn lent_list(data: *mut f32, shape: &[usize; 1]) -> RollTensor {
    let (bytes, owner) = (size_of::<f32>() * shape[0], std::ptr::null_mut());
    RollTensor {
        data: data.cast(),
        bytes,
        shape: shape.as_ptr(),
        rank: 1,
        dtype: F32,
        owner,
        retain: None,
        release: None,
    }
}

/// The address and length of a list that the other side lends.
///
/// # Safety
/// P1 and P9.
pub(super) unsafe fn borrowed_list(tensor: &RollTensor) -> Result<(*mut f32, usize)> {
    // SAFETY: as the caller promises.
    let (dtype, shape) = unsafe { dtype_and_shape(tensor) }?;
    let [length] = shape[..] else { return Err(Error::shape("a list", "[N]", &shape)) };
    if dtype != DType::F32 || length.checked_mul(size_of::<f32>()) != Some(tensor.bytes) {
        return Err(Error::Misuse(format!("a list of {length} f32 came as {} bytes of {dtype}", tensor.bytes)));
    }
    // SAFETY: as the caller promises. The slice serves only to check address, alignment and length.
    let checked = unsafe { slice(tensor.data.cast::<f32>(), length) }?;
    Ok(if checked.is_empty() { (std::ptr::dangling_mut(), 0) } else { (tensor.data.cast(), length) })
}

/// Takes over a tensor of an answer.
///
/// # Safety
/// P2 and P9.
pub(super) unsafe fn take(tensor: RollTensor) -> Result<Tensor> {
    let bytes = ForeignBytes(tensor);
    // SAFETY: as the caller promises. On an error, `bytes` is dropped, which releases the tensor.
    let (dtype, shape) = unsafe { dtype_and_shape(&tensor) }?;
    Tensor::from_bytes(dtype, shape, Arc::new(bytes))
}

/// Keeps a tensor of the arguments. Shares the bytes if the tensor can be retained, otherwise copies them.
///
/// # Safety
/// P1 and P9.
pub(super) unsafe fn receive(tensor: &RollTensor) -> Result<Tensor> {
    match tensor.retain {
        Some(retain) => {
            // SAFETY: the tensor is alive; from here on one owner is ours.
            unsafe {
                retain(tensor.owner);
                take(*tensor)
            }
        }
        None => {
            // SAFETY: as the caller promises.
            let (copy, (dtype, shape)) =
                unsafe { (slice(tensor.data.cast_const(), tensor.bytes)?.to_vec(), dtype_and_shape(tensor)?) };
            Tensor::from_bytes(dtype, shape, Arc::new(copy))
        }
    }
}

/// The dtype and shape of a tensor. Fails on values that no tensor has; the number of bytes is compared with the shape
/// later, by [`Tensor::from_bytes`].
///
/// # Safety
/// P9.
unsafe fn dtype_and_shape(tensor: &RollTensor) -> Result<(DType, Vec<usize>)> {
    let dtype = *DTYPES
        .get(tensor.dtype as usize)
        .ok_or_else(|| Error::Misuse(format!("a tensor's dtype is {}, which does not exist", tensor.dtype)))?;
    if tensor.rank > MAX_RANK {
        return Err(Error::Misuse(format!("a tensor has {} axes, more than {MAX_RANK}", tensor.rank)));
    }
    // SAFETY: as the caller promises.
    let shape = unsafe { slice(tensor.shape, tensor.rank) }?.to_vec();
    if tensor.bytes > isize::MAX as usize {
        return Err(Error::Misuse(format!("a tensor of shape {shape:?} claims {} bytes", tensor.bytes)));
    }
    if tensor.data.is_null() && tensor.bytes > 0 {
        return Err(Error::Misuse(format!("a tensor of shape {shape:?} has no data")));
    }
    Ok((dtype, shape))
}
