//! Which devices multiply in fp8.

use burn_tensor::Device;

/// How a device takes products in fp8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fp8Products {
    /// Tensor cores multiply the codes.
    TensorCores,
    /// Operands are rounded to fp8 and multiplied in another dtype: the precision of fp8 without its speed.
    Emulated,
    /// The device has no products in fp8, for this reason.
    Missing(String),
}

impl Fp8Products {
    /// How `device` takes them. A GPU of libtorch is asked by a small product, once for each GPU.
    pub fn of(device: &Device) -> Self {
        #[cfg(feature = "libtorch")]
        if let Some(number) = crate::device::libtorch_gpu(device) {
            return match super::libtorch::check_fp8_gpu(number) {
                Ok(()) => Self::TensorCores,
                Err(reason) => Self::Missing(reason),
            };
        }
        if crate::device::is_host(device) {
            return Self::Emulated;
        }
        Self::Missing("CubeCL's kernels (`cuda`, `wgpu`) have none".into())
    }
}
