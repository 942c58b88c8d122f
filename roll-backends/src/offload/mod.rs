//! Offloading of segment inputs to host memory, in their own dtype. The copy to the host overlaps with the computation
//! of the same segment; the copy back is prefetched while the following segment is pulled back. The network waits only
//! if copying takes longer than computing.
//!
//! Copies run on one background thread per direction. libtorch's threads share one stream per GPU, so copies from its
//! GPUs are queued on copy streams instead, to and from pinned memory, and the host never waits (`overlapped.rs`). If the
//! CUDA runtime cannot be used, they are queued on the kernels' stream (`aten.rs`).

#[cfg(feature = "libtorch")]
mod aten;
#[cfg(feature = "libtorch")]
mod overlapped;

use std::sync::mpsc::Receiver;

use burn::tensor::{DType, Device, Tensor as Burn, TensorData};
use half::bf16;
use roll_core::{Error, Result, Tensor};

#[cfg(feature = "libtorch")]
use crate::async_copies::{Cuda, H2dCopy};
use crate::background::{Purpose, begin};
use crate::host::{to_device_nd, to_host_nd};
use crate::{BackendError, NdTensor};
#[cfg(feature = "libtorch")]
use overlapped::Overlapped;

/// A tensor in host memory, or in flight to or from it.
pub struct Offloaded {
    location: TensorLocation,
    device: Device,
}

enum TensorLocation {
    /// In flight to host memory, on a background thread.
    ToHost(Receiver<Result<Tensor>>),
    Host(Tensor),
    #[cfg(feature = "libtorch")]
    Overlapped(Overlapped),
    #[cfg(feature = "libtorch")]
    Pinned(aten::Pinned),
    ToDevice(InFlight),
}

/// A tensor in flight back to the device.
pub struct InFlight(Transfer);

enum Transfer {
    /// A background thread copies.
    Background(Receiver<Result<NdTensor>>),
    /// A copy stream copies while kernels run.
    #[cfg(feature = "libtorch")]
    Overlapped(H2dCopy<Cuda, NdTensor>),
    /// The kernels' stream copies, before the kernels that are launched later.
    #[cfg(feature = "libtorch")]
    Queued(NdTensor),
}

impl Offloaded {
    /// Starts the copy to the host.
    pub fn new(tensor: NdTensor) -> Result<Self> {
        let device = tensor.device();
        #[cfg(feature = "libtorch")]
        if let Some(overlapped) = Overlapped::new(&tensor) {
            return Ok(Self { location: TensorLocation::Overlapped(overlapped), device });
        }
        #[cfg(feature = "libtorch")]
        if let Some(pinned) = aten::Pinned::new(&tensor)? {
            return Ok(Self { location: TensorLocation::Pinned(pinned), device });
        }
        let pending = begin(&device, Purpose::ToHost, move || to_host(&tensor));
        Ok(Self { location: TensorLocation::ToHost(pending), device })
    }

    /// Frees the device memory: waits until the copy has finished, or makes later kernels wait for it.
    pub fn release(&mut self) -> Result<()> {
        match &mut self.location {
            TensorLocation::ToHost(pending) => self.location = TensorLocation::Host(received(pending)?),
            #[cfg(feature = "libtorch")]
            TensorLocation::Overlapped(overlapped) => overlapped.release()?,
            _ => {}
        }
        Ok(())
    }

    /// Starts the copy back to the device; a second call has no effect.
    pub fn prefetch(&mut self) -> Result<()> {
        if !matches!(self.location, TensorLocation::ToDevice(_)) {
            self.location = TensorLocation::ToDevice(self.begin_upload()?);
        }
        Ok(())
    }

    /// Returns the tensor on the device. Waits for the copy, which is started unless it is in flight.
    pub fn into_device(mut self) -> Result<NdTensor> {
        match self.location {
            TensorLocation::ToDevice(in_flight) => in_flight.into_tensor(),
            _ => self.begin_upload()?.into_tensor(),
        }
    }

    /// Starts a copy to the device and keeps the tensor in host memory, so that it can be copied again.
    pub fn begin_upload(&mut self) -> Result<InFlight> {
        self.release()?;
        Ok(InFlight(match &mut self.location {
            TensorLocation::Host(tensor) => {
                let (tensor, device) = (tensor.clone(), self.device.clone());
                Transfer::Background(begin(&self.device, Purpose::ToDevice, move || to_device(&tensor, &device)))
            }
            #[cfg(feature = "libtorch")]
            TensorLocation::Overlapped(overlapped) => Transfer::Overlapped(overlapped.upload()?),
            #[cfg(feature = "libtorch")]
            TensorLocation::Pinned(pinned) => Transfer::Queued(pinned.upload()?),
            _ => return Err(copy_panicked()),
        }))
    }
}

impl InFlight {
    /// Returns the tensor on the device; waits for the copy, or makes later kernels wait for it.
    pub fn into_tensor(self) -> Result<NdTensor> {
        match self.0 {
            Transfer::Background(pending) => received(&pending),
            #[cfg(feature = "libtorch")]
            Transfer::Overlapped(copy) => Ok(copy.into_tensor()?),
            #[cfg(feature = "libtorch")]
            Transfer::Queued(tensor) => Ok(tensor),
        }
    }
}

/// Copies a tensor to the host; bf16 stays bf16, other dtypes become f32.
fn to_host(tensor: &NdTensor) -> Result<Tensor> {
    if tensor.flat().dtype() != DType::BF16 {
        return to_host_nd(tensor);
    }
    let values = tensor.flat().clone().into_data().try_into_vec::<bf16>();
    let values = values.map_err(|e| BackendError::Offload { reason: format!("{e:?}") })?;
    Tensor::new(values, tensor.shape())
}

/// Copies a tensor to the device; bf16 stays bf16, other dtypes become f32.
fn to_device(tensor: &Tensor, device: &Device) -> Result<NdTensor> {
    if tensor.dtype() != roll_core::DType::Bf16 {
        return to_device_nd(tensor, device);
    }
    let values = TensorData::new(tensor.as_slice::<bf16>()?.to_vec(), [tensor.len()]);
    Ok(NdTensor::from_flat(Burn::from_data(values, (device, DType::BF16)), tensor.shape()))
}

fn received<T>(pending: &Receiver<Result<T>>) -> Result<T> {
    pending.recv().unwrap_or_else(|_| Err(copy_panicked()))
}

/// The error after a panic of the copying thread, whose message is already printed.
fn copy_panicked() -> Error {
    Error::Misuse("the thread that copies tensors between device and host panicked".into())
}
