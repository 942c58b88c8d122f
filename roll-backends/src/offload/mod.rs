//! Offloading of segment inputs to host memory, in their own dtype. The copy to the host overlaps with the computation
//! of the same segment; the copy back is prefetched while the following segment is pulled back. The network waits only
//! if copying takes longer than computing.
//!
//! Copies run on one background thread per direction. For GPUs of libtorch this would not overlap, because all threads
//! share one stream per GPU. There, copies are queued on copy streams of their own, to and from pinned memory, and the
//! host never waits (`overlapped.rs`).

#[cfg(feature = "libtorch")]
mod overlapped;

use std::sync::mpsc::Receiver;

use burn_tensor::{DType, Device, Int, Tensor as Burn, TensorData};
use half::bf16;
use roll_core::{Error, Result, Tensor};

#[cfg(feature = "libtorch")]
use crate::async_copies::{Cuda, H2dCopy};
#[cfg(feature = "libtorch")]
use crate::backend::{LibTorch, libtorch::TchTensor};
use crate::background::{Purpose, begin};
use crate::host::{to_device_nd, to_host_nd};
use crate::{BackendError, NdTensor};
#[cfg(feature = "libtorch")]
use overlapped::Overlapped;

/// A tensor in host memory, or in flight to or from it.
pub struct Offloaded<T: DeviceTensor = NdTensor> {
    location: TensorLocation<T>,
    device: Device,
}

/// A device tensor that can be copied to host memory and back with the same bits: floats, or the codes of a matrix in
/// eight bits.
pub trait DeviceTensor: Clone + Send + 'static {
    /// The device.
    fn device(&self) -> Device;

    /// Copies the values to the host.
    fn to_host(&self) -> Result<Tensor>;

    /// Copies values that [`DeviceTensor::to_host`] returned to `device`.
    fn to_device(tensor: &Tensor, device: &Device) -> Result<Self>;

    /// The flat values and the shape. `None` unless the device is one of libtorch.
    #[cfg(feature = "libtorch")]
    fn to_tch(&self) -> Option<(tch::Tensor, Vec<usize>)>;

    /// Wraps flat values of libtorch.
    #[cfg(feature = "libtorch")]
    fn from_tch(values: tch::Tensor, shape: &[usize]) -> Self;
}

enum TensorLocation<T: DeviceTensor> {
    /// In flight to host memory, on a background thread.
    ToHost(Receiver<Result<Tensor>>),
    Host(Tensor),
    /// In pinned host memory, or in flight to it on a copy stream.
    #[cfg(feature = "libtorch")]
    OnCopyStream(Overlapped<T>),
    /// In flight to the device; no longer in host memory.
    ToDevice(InFlight<T>),
}

/// A tensor in flight back to the device.
pub struct InFlight<T = NdTensor>(Transfer<T>);

enum Transfer<T> {
    /// A background thread copies.
    Background(Receiver<Result<T>>),
    /// A copy stream copies while kernels run.
    #[cfg(feature = "libtorch")]
    OnCopyStream(H2dCopy<Cuda, T>),
}

impl<T: DeviceTensor> Offloaded<T> {
    /// Starts the copy to the host.
    pub fn new(tensor: T) -> Result<Self> {
        let device = tensor.device();
        #[cfg(feature = "libtorch")]
        if let Some(overlapped) = Overlapped::new(&tensor) {
            return Ok(Self { location: TensorLocation::OnCopyStream(overlapped), device });
        }
        let pending = begin(&device, Purpose::ToHost, move || tensor.to_host());
        Ok(Self { location: TensorLocation::ToHost(pending), device })
    }

    /// Frees the device memory. Waits until the copy to the host has finished; on a copy stream, makes later kernels
    /// wait for it instead.
    pub fn release(&mut self) -> Result<()> {
        match &mut self.location {
            TensorLocation::ToHost(pending) => self.location = TensorLocation::Host(received(pending)?),
            #[cfg(feature = "libtorch")]
            TensorLocation::OnCopyStream(overlapped) => overlapped.release()?,
            TensorLocation::Host(_) | TensorLocation::ToDevice(_) => {}
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

    /// Returns the tensor on the device. Starts the copy to the device unless it is in flight, and waits for it.
    pub fn into_device(mut self) -> Result<T> {
        match self.location {
            TensorLocation::ToDevice(in_flight) => in_flight.into_tensor(),
            _ => self.begin_upload()?.into_tensor(),
        }
    }

    /// Waits for the copy to the host and returns the values. Fails unless they are f32.
    pub fn values(&mut self) -> Result<&[f32]> {
        if matches!(self.location, TensorLocation::ToHost(_)) {
            self.release()?;
        }
        match &mut self.location {
            TensorLocation::Host(tensor) => tensor.f32s(),
            #[cfg(feature = "libtorch")]
            TensorLocation::OnCopyStream(overlapped) => overlapped.values(),
            TensorLocation::ToHost(_) | TensorLocation::ToDevice(_) => Err(not_in_host_memory()),
        }
    }

    /// Starts a copy to the device and keeps the tensor in host memory, so that it can be copied again. Fails after
    /// [`Offloaded::prefetch`], which does not keep it there.
    pub fn begin_upload(&mut self) -> Result<InFlight<T>> {
        self.release()?;
        Ok(InFlight(match &mut self.location {
            TensorLocation::Host(tensor) => {
                let (tensor, device) = (tensor.clone(), self.device.clone());
                Transfer::Background(begin(&self.device, Purpose::ToDevice, move || T::to_device(&tensor, &device)))
            }
            #[cfg(feature = "libtorch")]
            TensorLocation::OnCopyStream(overlapped) => Transfer::OnCopyStream(overlapped.upload()?),
            // `release` has replaced `ToHost`.
            TensorLocation::ToHost(_) | TensorLocation::ToDevice(_) => return Err(not_in_host_memory()),
        }))
    }
}

impl<T> InFlight<T> {
    /// Returns the tensor on the device. Waits for the copy; on a copy stream, makes later kernels wait for it instead.
    pub fn into_tensor(self) -> Result<T> {
        match self.0 {
            Transfer::Background(pending) => received(&pending),
            #[cfg(feature = "libtorch")]
            Transfer::OnCopyStream(copy) => Ok(copy.into_tensor()?),
        }
    }
}

/// Floats: bf16 stays bf16, other dtypes become f32.
impl DeviceTensor for NdTensor {
    fn device(&self) -> Device {
        self.device()
    }

    fn to_host(&self) -> Result<Tensor> {
        if self.flat().dtype() != DType::BF16 {
            return to_host_nd(self);
        }
        Tensor::new(downloaded::<bf16>(self.flat().clone().into_data())?, self.shape())
    }

    fn to_device(tensor: &Tensor, device: &Device) -> Result<Self> {
        if tensor.dtype() != roll_core::DType::Bf16 {
            return to_device_nd(tensor, device);
        }
        let values = TensorData::new(tensor.as_slice::<bf16>()?.to_vec(), [tensor.len()]);
        Ok(Self::from_flat(Burn::from_data(values, (device, DType::BF16)), tensor.shape()))
    }

    #[cfg(feature = "libtorch")]
    fn to_tch(&self) -> Option<(tch::Tensor, Vec<usize>)> {
        let TchTensor { tensor, .. } = self.flat().clone().try_into_primitive::<LibTorch>().ok()?;
        Some((tensor, self.shape().to_vec()))
    }

    #[cfg(feature = "libtorch")]
    fn from_tch(values: tch::Tensor, shape: &[usize]) -> Self {
        Self::from_flat(Burn::from_primitive::<LibTorch>(TchTensor::new(values)), shape)
    }
}

/// The codes of a [`crate::ScaledMatrix`], u8.
impl DeviceTensor for Burn<2, Int> {
    fn device(&self) -> Device {
        self.device()
    }

    fn to_host(&self) -> Result<Tensor> {
        Tensor::new(downloaded::<u8>(self.clone().into_data())?, self.dims())
    }

    fn to_device(tensor: &Tensor, device: &Device) -> Result<Self> {
        let values = TensorData::new(tensor.as_slice::<u8>()?.to_vec(), tensor.shape());
        Ok(Self::from_data(values, (device, DType::U8)))
    }

    #[cfg(feature = "libtorch")]
    fn to_tch(&self) -> Option<(tch::Tensor, Vec<usize>)> {
        let [rows, columns] = self.dims();
        let flat = self.clone().reshape([rows * columns]);
        let TchTensor { tensor, .. } = flat.try_into_primitive::<LibTorch>().ok()?;
        Some((tensor, vec![rows, columns]))
    }

    #[cfg(feature = "libtorch")]
    fn from_tch(values: tch::Tensor, shape: &[usize]) -> Self {
        Burn::<1, Int>::from_primitive::<LibTorch>(TchTensor::new(values)).reshape([shape[0], shape[1]])
    }
}

fn downloaded<E: burn_tensor::Element>(values: TensorData) -> Result<Vec<E>> {
    // Burn reads all integers of libtorch as i64.
    Ok(values.convert::<E>().try_into_vec::<E>().map_err(|e| BackendError::Offload { reason: format!("{e:?}") })?)
}

fn received<T>(pending: &Receiver<Result<T>>) -> Result<T> {
    pending.recv().unwrap_or_else(|_| Err(copy_panicked()))
}

/// The error of a caller that needs a tensor in host memory after [`Offloaded::prefetch`].
fn not_in_host_memory() -> Error {
    Error::Misuse("expected a tensor in host memory, found one that returns to its device".into())
}

/// The error after a panic of the copying thread, whose message is already printed.
fn copy_panicked() -> Error {
    Error::Misuse("the thread that copies tensors between device and host panicked".into())
}
