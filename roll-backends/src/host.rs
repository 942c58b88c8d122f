//! Copies between host tensors ([`roll_core::Tensor`]) and device tensors.

use std::borrow::Cow;

use burn_tensor::{DType, Device, Tensor as Burn};
use roll_core::{Error, Result, Tensor};

use crate::weights::SegmentMemory;
use crate::{BackendError, NdTensor};

/// Copies a float host tensor to the device as f32. Fails if its rank is not `D`.
pub fn to_device<const D: usize>(tensor: &Tensor, device: &Device) -> Result<Burn<D>> {
    let shape: [usize; D] = tensor.shape().try_into().map_err(|_| BackendError::Rank {
        what: "host tensor".into(),
        expected: D,
        found: tensor.shape().to_vec(),
    })?;
    Ok(upload(values(tensor), shape, device))
}

/// Copies f32 values to the device. On the way to a GPU of libtorch, all threads copy large values. Panics unless the
/// values fill the shape.
pub fn values_to_device<const D: usize>(values: Cow<'_, [f32]>, shape: [usize; D], device: &Device) -> Burn<D> {
    upload(values, shape, device)
}

/// The values as f32, borrowed if the tensor is f32.
pub(crate) fn values(tensor: &Tensor) -> Cow<'_, [f32]> {
    tensor.as_slice::<f32>().map_or_else(|_| Cow::Owned(tensor.to_f32_vec()), Cow::Borrowed)
}

fn upload<const D: usize>(values: Cow<'_, [f32]>, shape: [usize; D], device: &Device) -> Burn<D> {
    SegmentMemory::default().upload(values, shape, device)
}

/// Replaces each number by its exponential, to about one unit in the last place, and returns their sum.
pub fn exponentials(values: &mut [f32]) -> f32 {
    #[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
    {
        crate::ops::exponentials(values)
    }
    #[cfg(not(all(feature = "flex", not(feature = "portable-kernels"))))]
    {
        values.iter_mut().for_each(|value| *value = value.exp());
        values.iter().sum()
    }
}

/// Copies a float host tensor of any rank to the device as f32.
pub fn to_device_nd(tensor: &Tensor, device: &Device) -> Result<NdTensor> {
    let flat = to_device::<1>(&tensor.reshape([tensor.len()])?, device)?;
    Ok(NdTensor::from_flat(flat, tensor.shape()))
}

/// Copies a device tensor to the host as f32. An unshared f32 tensor on a CPU device is moved, not copied. Waits for
/// the device; fails if an earlier kernel failed.
pub fn to_host<const D: usize>(tensor: Burn<D>) -> Result<Tensor> {
    let tensor = if tensor.device().is_autodiff() { tensor.inner() } else { tensor };
    let shape = tensor.dims().to_vec();
    let values = tensor
        .cast(DType::F32)
        .try_into_data()
        .map_err(|error| BackendError::Device { reason: first_lines(&error.to_string()) })?
        .try_into_vec::<f32>()
        .map_err(|e| Error::Misuse(format!("reading a tensor back from its device: {e:?}")))?;
    Tensor::new(values, shape)
}

/// The first lines of an error message of a device's library, as one line; the rest is a kernel's source or a
/// backtrace.
fn first_lines(error: &str) -> String {
    const MAX_LINES: usize = 6;
    const MAX_CHARS: usize = 400;
    let lines: Vec<_> = error.lines().map(str::trim).filter(|line| !line.is_empty()).take(MAX_LINES).collect();
    lines.join(" ").chars().take(MAX_CHARS).collect()
}

/// Copies a device tensor of any rank to the host as f32.
pub fn to_host_nd(tensor: &NdTensor) -> Result<Tensor> {
    to_host(tensor.flat().clone())?.reshape(tensor.shape())
}
