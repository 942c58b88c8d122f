//! Weights in host memory, in the storage format of a device.

use burn::tensor::Device;
use roll_core::{Result, Tensor};

use super::{Storage, Weight};
use crate::{EightBits, ScaledMatrix, ScaledRows};

/// A weight between file and device.
#[derive(Clone, Debug)]
pub enum HostWeight {
    /// A dense tensor, f32 or bf16.
    Dense(Tensor),
    /// An eight-bit matrix.
    Scaled(ScaledRows),
}

/// The storage format of matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatrixStorage {
    /// Dense, like all other weights.
    #[default]
    Dense,
    /// Eight-bit if the file stores the matrix so, else dense.
    AsInFile,
    /// Eight-bit for the matrices of the network's blocks, else dense.
    Eight(EightBits),
}

/// Prefix of the weights that [`MatrixStorage::Eight`] applies to: the transformer blocks.
const BLOCKS: &str = "blocks.";

impl HostWeight {
    /// Converts the weight `key` to the format of `storage`. `wide` returns its values; `scaled` holds them if the file
    /// stores eight bits. A tensor that keeps its dtype shares its bytes.
    pub fn new(
        storage: Storage,
        key: &str,
        scaled: Option<ScaledRows>,
        wide: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        match (storage.matrices, scaled) {
            (MatrixStorage::AsInFile, Some(rows)) => return Ok(Self::Scaled(rows)),
            (MatrixStorage::Eight(kind), Some(rows)) if rows.kind() == kind => return Ok(Self::Scaled(rows)),
            _ => {}
        }
        let tensor = wide()?;
        match storage.matrices {
            MatrixStorage::Eight(kind) if key.starts_with(BLOCKS) && tensor.shape().len() == 2 => {
                Ok(Self::Scaled(ScaledRows::quantised(&tensor, kind)?))
            }
            _ => Ok(Self::Dense(tensor)),
        }
    }

    /// Uploads the weight `key` to `device`; a dense one in the dtype of `storage`.
    pub fn upload(self, storage: Storage, key: &str, device: &Device) -> Weight {
        match self {
            Self::Dense(tensor) => Weight::new(&tensor, storage.of(key, tensor.dtype()), device),
            Self::Scaled(rows) => Weight::from_scaled(ScaledMatrix::new(rows, device)),
        }
    }
}
