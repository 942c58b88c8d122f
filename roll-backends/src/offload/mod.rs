//! Segment inputs in host memory, in the dtype they have. Each goes there while its own segment is computed, and comes
//! back while the segment behind it is pulled: the network waits only where copying takes longer than computing.
//!
//! The copies run on a thread per direction. On libtorch's GPUs, whose threads share one stream, they are queued on
//! streams beside it instead, to and from page-locked memory, and the host waits for nothing (`beside.rs`); or, where
//! the CUDA runtime cannot be used, on the one stream (`aten.rs`).

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

/// A tensor that is on its way to the host, there, or on its way back.
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

/// A tensor on its way back to the device.
pub struct Returning(Way);

enum Way {
    Copied(Receiver<Result<NdTensor>>),
    #[cfg(feature = "libtorch")]
    Beside(beside::OnItsWay),
    #[cfg(feature = "libtorch")]
    Here(NdTensor),
}

impl Offloaded {
    /// Sends it to the host.
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

    /// Gives up its memory on the device: waits until it has left, or has the kernels that come now wait for that.
    pub fn settle(&mut self) -> Result<()> {
        match &mut self.place {
            Place::Leaving(leaving) => self.place = Place::Host(arrived(leaving)?),
            #[cfg(feature = "libtorch")]
            Place::Beside(beside) => beside.release()?,
            _ => {}
        }
        Ok(())
    }

    /// Sends it back to the device, for good.
    pub fn begin_return(&mut self) -> Result<()> {
        if !matches!(self.place, Place::Returning(_)) {
            self.place = Place::Returning(self.send_back()?);
        }
        Ok(())
    }

    /// It, on the device again.
    pub fn back(mut self) -> Result<NdTensor> {
        self.begin_return()?;
        match self.place {
            Place::Returning(returning) => returning.take(),
            _ => Err(given_up()),
        }
    }

    /// Sends a copy to the device; it stays in host memory, from where others can be sent.
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

/// f32 or bf16, as it is.
fn to_host(tensor: &NdTensor) -> Result<Tensor> {
    if tensor.flat().dtype() != DType::BF16 {
        return to_host_nd(tensor);
    }
    let values = tensor.flat().clone().into_data().try_into_vec::<bf16>();
    let values = values.map_err(|e| BackendError::Offload { reason: format!("{e:?}") })?;
    Tensor::new(values, tensor.shape())
}

/// Likewise.
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

/// The copying thread panicked, and said why.
fn given_up() -> Error {
    Error::Misuse("copying a segment's input between device and host was given up".into())
}
