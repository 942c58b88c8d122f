//! What frozen weights are stored in, and products computed in.

use burn::tensor::{DType, Device};
use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Storage of frozen weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsDType {
    /// As in the file, where the device has that: bf16 takes four bytes on one without.
    #[default]
    Auto,
    /// Four bytes.
    F32,
    /// Two bytes.
    Bf16,
}

impl WeightsDType {
    /// On `device`, for weights whose file has `stored`. Fails if bf16 is asked of a device without it.
    pub fn of(self, stored: DType, device: &Device) -> Result<DType> {
        match self {
            Self::Auto => Ok(storable(stored, device)),
            Self::F32 => Ok(DType::F32),
            Self::Bf16 => bf16("model.weights_dtype", device),
        }
    }
}

/// What products of matrices and attention are taken in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDType {
    /// bf16 where the weights are and the device is a GPU.
    #[default]
    Auto,
    /// f32.
    F32,
    /// bf16, with sums in f32.
    Bf16,
}

impl ComputeDType {
    /// For weights stored as `weights` on `device`. Fails if bf16 is asked of a device without it.
    pub fn of(self, weights: DType, device: &Device) -> Result<DType> {
        match self {
            Self::Auto => Ok(roll_backends::product_dtype(device, weights)),
            Self::F32 => Ok(DType::F32),
            Self::Bf16 => bf16("model.compute_dtype", device),
        }
    }
}

/// What `device` stores numbers of `dtype` in without loss: bf16 as f32, where it has no bf16.
pub(crate) fn storable(dtype: DType, device: &Device) -> DType {
    if dtype == DType::BF16 && !device.supports_dtype(DType::BF16) { DType::F32 } else { dtype }
}

fn bf16(key: &str, device: &Device) -> Result<DType> {
    match storable(DType::BF16, device) {
        DType::BF16 => Ok(DType::BF16),
        _ => Err(Error::config(key, "expected auto or f32: the device of this backend has no bf16")),
    }
}
