//! Choosing a device by name.

use burn::tensor::Device;
use roll_core::Result;

use crate::BackendError;

/// The device that `--backend` names. Fails, naming what is missing, when it is not compiled in.
pub fn device(name: &str) -> Result<Device> {
    match name {
        #[cfg(feature = "flex")]
        "flex" | "cpu" => Ok(Device::flex()),
        #[cfg(not(feature = "flex"))]
        "flex" | "cpu" => Err(missing(name, "build with `--features flex`")),
        _ => Err(missing(name, "this build knows: flex")),
    }
}

fn missing(name: &str, reason: &str) -> roll_core::Error {
    BackendError::Backend { name: name.into(), reason: reason.into() }.into()
}
