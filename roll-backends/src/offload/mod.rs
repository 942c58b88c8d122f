//! Offloading of segment inputs to host memory, in their own dtype. The copy to the host overlaps with the computation
//! of the same segment; the copy back is prefetched while the following segment is pulled back. The network waits only
//! if copying takes longer than computing.
//!
//! Copies run on one background thread per direction. libtorch's threads share one stream per GPU, so copies from its
//! GPUs are queued on copy streams instead, to and from pinned memory, and the host never waits (`beside.rs`). If the
//! CUDA runtime cannot be used, they are queued on the kernels' stream (`aten.rs`).

#[cfg(feature = "libtorch")]
mod aten;
#[cfg(feature = "libtorch")]
mod beside;

use std::sync::mpsc::Receiver;

use burn::tensor::{DType, Device, Tensor as Burn, TensorData};
use half::bf16;
use roll_core::{Error, Result, Tensor};

use crate::background::{Purpose, begin};
use crate::host::{to_device_nd, to_host_nd};
use crate::{BackendError, NdTensor};

/// A tensor in host memory, or in flight to or from it.
pub struct Offloaded {
    place: Place,
    device: Device,
}

enum Place {
    Leaving(Receiver<Result<Tensor>>),
    Host(Tensor),
    #[cfg(feature = "libtorch")]
    Beside(beside::Beside),
    #[cfg(feature = "libtorch")]
    Pinned(aten::Pinned),
    Returning(Returning),
}

/// A tensor in flight back to the device.
pub struct Returning(Way);

enum Way {
    Copied(Receiver<Result<NdTensor>>),
    #[cfg(feature = "libtorch")]
    Beside(beside::OnItsWay),
    #[cfg(feature = "libtorch")]
    Here(NdTensor),
}

impl Offloaded {
    /// Starts the copy to the host.
    pub fn new(tensor: NdTensor) -> Result<Self> {
        let device = tensor.device();
        #[cfg(feature = "libtorch")]
        if let Some(beside) = beside::Beside::new(&tensor) {
            return Ok(Self { place: Place::Beside(beside), device });
        }
        #[cfg(feature = "libtorch")]
        if let Some(pinned) = aten::Pinned::new(&tensor)? {
            return Ok(Self { place: Place::Pinned(pinned), device });
        }
        let leaving = begin(&device, Purpose::ToHost, move || to_host(&tensor));
        Ok(Self { place: Place::Leaving(leaving), device })
    }

    /// Frees the device memory: waits until the copy has finished, or makes later kernels wait for it.
    pub fn settle(&mut self) -> Result<()> {
        match &mut self.place {
            Place::Leaving(leaving) => self.place = Place::Host(arrived(leaving)?),
            #[cfg(feature = "libtorch")]
            Place::Beside(beside) => beside.release()?,
            _ => {}
        }
        Ok(())
    }

    /// Starts the copy back to the device; a second call has no effect.
    pub fn begin_return(&mut self) -> Result<()> {
        if !matches!(self.place, Place::Returning(_)) {
            self.place = Place::Returning(self.send_back()?);
        }
        Ok(())
    }

    /// Returns the tensor on the device. Waits for the copy, which is started unless it is in flight.
    pub fn back(mut self) -> Result<NdTensor> {
        self.begin_return()?;
        match self.place {
            Place::Returning(returning) => returning.take(),
            _ => Err(given_up()),
        }
    }

    /// Starts a copy to the device and keeps the tensor in host memory, so that it can be copied again.
    pub fn send_back(&mut self) -> Result<Returning> {
        self.settle()?;
        Ok(Returning(match &mut self.place {
            Place::Host(tensor) => {
                let (tensor, device) = (tensor.clone(), self.device.clone());
                Way::Copied(begin(&self.device, Purpose::ToDevice, move || to_device(&tensor, &device)))
            }
            #[cfg(feature = "libtorch")]
            Place::Beside(beside) => Way::Beside(beside.back()?),
            #[cfg(feature = "libtorch")]
            Place::Pinned(pinned) => Way::Here(pinned.back()?),
            _ => return Err(given_up()),
        }))
    }
}

impl Returning {
    /// The tensor, on the device.
    pub fn take(self) -> Result<NdTensor> {
        match self.0 {
            Way::Copied(coming) => arrived(&coming),
            #[cfg(feature = "libtorch")]
            Way::Beside(coming) => coming.take(),
            #[cfg(feature = "libtorch")]
            Way::Here(tensor) => Ok(tensor),
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

fn arrived<T>(coming: &Receiver<Result<T>>) -> Result<T> {
    coming.recv().unwrap_or_else(|_| Err(given_up()))
}

/// The error after a panic of the copying thread, whose message is already printed.
fn given_up() -> Error {
    Error::Misuse("copying a segment's input between device and host was given up".into())
}
