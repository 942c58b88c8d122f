//! Dtypes of frozen weights and of matrix products.

use burn_tensor::{DType, Device, Tensor};
use roll_backends::EightBits;
use roll_backends::device::{has_bytes, is_gpu, prefers_channels_innermost};
use roll_backends::ops::Fp8Products;
use roll_backends::weights::{MatrixStorage, Storage};
use roll_core::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Traits of a device that determine how weights are stored and products are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTraits {
    /// Whether it is a GPU.
    pub is_gpu: bool,
    /// Whether it computes in bf16.
    pub has_bf16: bool,
    /// Whether it stores integers of eight bits.
    pub has_bytes: bool,
    /// Whether it convolves bf16 faster than f32.
    pub convolves_bf16: bool,
}

impl DeviceTraits {
    /// The traits of `device`.
    pub fn of(device: &Device) -> Self {
        let has_bf16 = device.supports_dtype(DType::BF16);
        // CubeCL's convolutions convert bf16 to f32 and back; libtorch's on GPUs do not.
        let convolves_bf16 = has_bf16 && prefers_channels_innermost(device);
        Self { is_gpu: is_gpu(device), has_bf16, has_bytes: has_bytes(device), convolves_bf16 }
    }

    /// The traits of a machine that a run is planned for: a GPU of libtorch, or the CPU.
    pub fn planned(is_gpu: bool) -> Self {
        Self { is_gpu, has_bf16: true, has_bytes: true, convolves_bf16: is_gpu }
    }

    /// The dtype in which the device stores numbers of `dtype` without loss: f32 for bf16 on a device without bf16.
    pub fn storable(self, dtype: DType) -> DType {
        if dtype == DType::BF16 && !self.has_bf16 { DType::F32 } else { dtype }
    }

    /// bf16. Fails with the configuration's `key` on a device without it.
    pub fn bf16(self, key: &str) -> Result<DType> {
        if self.has_bf16 {
            Ok(DType::BF16)
        } else {
            Err(Error::config(key, "expected auto or f32: the device of this backend has no bf16"))
        }
    }
}

/// The dtype in which frozen weights are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WeightsDType {
    /// bf16 on GPUs, the file's dtype on the CPU, f32 on a device without bf16. Matrices that a file of `wan2_2` has in
    /// fp8 or int8 keep that dtype.
    #[default]
    Auto,
    /// Four bytes per element.
    F32,
    /// Two bytes per element.
    Bf16,
    /// One byte per element: signed integers with one scale per row. The matrices of `wan2_2`'s blocks are quantised
    /// when they are loaded; all other weights are stored as with `auto`.
    Int8,
    /// One byte per element: fp8 (e4m3) with one scale per row, for the same matrices as `int8`.
    Fp8,
}

impl WeightsDType {
    /// Returns the dtype of dense weights on `device` if their file has `stored`. Fails if bf16 is chosen and `device`
    /// has none.
    pub fn of(self, stored: DType, device: DeviceTraits) -> Result<DType> {
        match self {
            Self::F32 => Ok(DType::F32),
            Self::Bf16 => device.bf16("model.weights_dtype"),
            Self::Auto | Self::Int8 | Self::Fp8 => {
                Ok(device.storable(if device.is_gpu { DType::BF16 } else { stored }))
            }
        }
    }

    /// Returns the storage of all weights: the dtype of [`WeightsDType::of`] for dense ones, and the format of
    /// matrices. The weights that `exact` names ([`Storage::exact`]) stay f32 unless f32 or bf16 is chosen explicitly.
    /// Fails if eight bits are chosen and `device` has no integers of eight bits.
    pub fn storage(self, stored: DType, exact: &'static [&'static str], device: DeviceTraits) -> Result<Storage> {
        let dtype = self.of(stored, device)?;
        let matrices = match self.eight_bits() {
            Some(kind) if device.has_bytes => MatrixStorage::Eight(kind),
            Some(_) => {
                let problem = "expected auto, f32 or bf16: the device of this backend has no integers of eight bits";
                return Err(Error::config("model.weights_dtype", problem));
            }
            None if self == Self::Auto && device.has_bytes => MatrixStorage::AsInFile,
            None => MatrixStorage::Dense,
        };
        let exact = if matches!(self, Self::F32 | Self::Bf16) { &[] } else { exact };
        Ok(Storage { dtype, exact, matrices })
    }

    /// The format to which matrices are quantised.
    pub fn eight_bits(self) -> Option<EightBits> {
        match self {
            Self::Auto | Self::F32 | Self::Bf16 => None,
            Self::Int8 => Some(EightBits::Int8),
            Self::Fp8 => Some(EightBits::E4m3),
        }
    }
}

/// The dtype of matrix products and of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDType {
    /// bf16 if the weights are bf16 and the device is a GPU; f32 otherwise.
    #[default]
    Auto,
    /// f32.
    F32,
    /// bf16, accumulated in f32.
    Bf16,
}

impl ComputeDType {
    /// Returns the dtype for weights that are stored as `weights` on `device`. Fails if bf16 is chosen and `device` has
    /// none.
    pub fn of(self, weights: DType, device: DeviceTraits) -> Result<DType> {
        match self {
            Self::Auto if device.is_gpu => Ok(device.storable(weights)),
            Self::Auto | Self::F32 => Ok(DType::F32),
            Self::Bf16 => device.bf16("model.compute_dtype"),
        }
    }
}

/// How products with frozen fp8 weights (e4m3) are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Products {
    /// In `compute_dtype`, after the weights are decoded to it.
    #[default]
    Auto,
    /// In fp8, with sums in f32.
    Fp8,
}

impl Products {
    /// Returns how `device` takes the products if fp8 is chosen, and `None` otherwise. Fails if the device has no
    /// products in fp8, or if `weights`, the format of the frozen matrices, is not e4m3.
    pub fn of(self, weights: Option<EightBits>, device: &Device) -> Result<Option<Fp8Products>> {
        self.check_weights(weights)?;
        if self == Self::Auto {
            return Ok(None);
        }
        match Fp8Products::of(device) {
            Fp8Products::Missing(reason) => Err(Error::config(
                "model.products",
                format!(
                    "expected auto: this device takes no products in fp8: {reason}. GPUs of compute capability 8.9 and \
                     newer (Ada, Hopper, Blackwell) do with `libtorch-cuda`, and the CPU emulates them"
                ),
            )),
            found => Ok(Some(found)),
        }
    }

    /// Fails if fp8 is chosen and `weights`, the format of the frozen matrices, is not e4m3.
    pub fn check_weights(self, weights: Option<EightBits>) -> Result<()> {
        let found = match (self, weights) {
            (Self::Auto, _) | (_, Some(EightBits::E4m3)) => return Ok(()),
            (_, Some(EightBits::Int8)) => "int8",
            (_, Some(EightBits::E5m2)) => "fp8 of the format e5m2",
            (_, None) => "no weights in eight bits",
        };
        let problem = format!(
            "expected auto, or frozen weights in fp8 (e4m3): found {found}; `model.weights_dtype: fp8` rounds the \
             weights to it"
        );
        Err(Error::config("model.products", problem))
    }
}

/// Converts `x` to `dtype` if it has another.
pub fn as_dtype<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn products_in_fp8_need_weights_in_e4m3() {
        let flex = roll_backends::device("flex").unwrap();
        let of = |weights| Products::Fp8.of(weights, &flex);
        assert_eq!(of(Some(EightBits::E4m3)).unwrap(), Some(Fp8Products::Emulated));
        for (weights, found) in
            [(None, "no weights in eight bits"), (Some(EightBits::Int8), "int8"), (Some(EightBits::E5m2), "e5m2")]
        {
            assert_eq!(Products::Auto.of(weights, &flex).unwrap(), None);
            let message = of(weights).unwrap_err().to_string();
            let parts = ["`model.products`", found, "`model.weights_dtype: fp8`"];
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn left_open_weights_are_bf16_on_gpus_and_as_in_the_file_on_the_cpu() {
        let [cpu, gpu] = [false, true].map(DeviceTraits::planned);
        let without_bf16 = DeviceTraits { has_bf16: false, ..gpu };
        for stored in [DType::F32, DType::BF16] {
            assert_eq!(WeightsDType::Auto.of(stored, gpu).unwrap(), DType::BF16);
            assert_eq!(WeightsDType::Auto.of(stored, cpu).unwrap(), stored);
            assert_eq!(WeightsDType::Auto.of(stored, without_bf16).unwrap(), DType::F32);
            assert_eq!(WeightsDType::F32.of(stored, gpu).unwrap(), DType::F32);
            assert_eq!(WeightsDType::Bf16.of(stored, cpu).unwrap(), DType::BF16);
            let message = WeightsDType::Bf16.of(stored, without_bf16).unwrap_err().to_string();
            assert!(message.contains("`model.weights_dtype`"), "{message}");
        }
    }
}
