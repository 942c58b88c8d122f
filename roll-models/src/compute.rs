//! What products are computed in.

use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};

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
    /// For weights stored as `weights` on `device`.
    pub fn of(self, weights: DType, device: &Device) -> DType {
        match self {
            Self::Auto => roll_backends::product_dtype(device, weights),
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}
