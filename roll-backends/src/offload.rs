//! Segment inputs in host memory. Each goes there while its own segment is computed, and comes back while the segment
//! behind it is pulled, on a thread of its own: the network waits only where copying takes longer than computing.

use std::sync::mpsc::{self, Receiver};

use burn::tensor::Device;
use roll_core::{Error, Result, Tensor};

use crate::NdTensor;
use crate::host::{to_device_nd, to_host_nd};

/// A tensor that is on its way to the host, there, or on its way back.
pub struct Offloaded {
    place: Place,
    device: Device,
}

enum Place {
    Leaving(Receiver<Result<Tensor>>),
    Host(Tensor),
    Returning(Receiver<Result<NdTensor>>),
}

impl Offloaded {
    /// Sends it to the host.
    pub fn new(tensor: NdTensor) -> Self {
        let device = tensor.device();
        Self { place: Place::Leaving(meanwhile(move || to_host_nd(&tensor))), device }
    }

    /// Waits until it has left the device.
    pub fn settle(&mut self) -> Result<()> {
        if let Place::Leaving(leaving) = &self.place {
            self.place = Place::Host(arrived(leaving)?);
        }
        Ok(())
    }

    /// Sends it back to the device.
    pub fn begin_return(&mut self) -> Result<()> {
        self.settle()?;
        if let Place::Host(tensor) = &self.place {
            let (tensor, device) = (tensor.clone(), self.device.clone());
            self.place = Place::Returning(meanwhile(move || to_device_nd(&tensor, &device)));
        }
        Ok(())
    }

    /// It, on the device again.
    pub fn back(mut self) -> Result<NdTensor> {
        self.begin_return()?;
        match &self.place {
            Place::Returning(returning) => arrived(returning),
            Place::Leaving(_) | Place::Host(_) => Err(given_up()),
        }
    }
}

fn meanwhile<T: Send + 'static>(copy: impl FnOnce() -> Result<T> + Send + 'static) -> Receiver<Result<T>> {
    let (send, coming) = mpsc::channel();
    // Whoever dropped the other end wants nothing any more.
    std::thread::spawn(move || send.send(copy()).unwrap_or(()));
    coming
}

fn arrived<T>(coming: &Receiver<Result<T>>) -> Result<T> {
    coming.recv().unwrap_or_else(|_| Err(given_up()))
}

/// The copying thread panicked, and said why.
fn given_up() -> Error {
    Error::Misuse("copying a segment's input between device and host was given up".into())
}
