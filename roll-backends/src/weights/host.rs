//! Weights in host memory as a device will store them.

use burn::tensor::Device;
use roll_core::{Result, Tensor};

use super::{Storage, Weight};
use crate::{EightBits, ScaledMatrix, ScaledRows};

/// A weight on its way from a file to a device.
#[derive(Clone, Debug)]
pub enum HostWeight {
    /// f32 or bf16.
    Dense(Tensor),
    /// A matrix in eight bits.
    Scaled(ScaledRows),
}

/// Storage of matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Matrices {
    /// As all other weights.
    #[default]
    Dense,
    /// In eight bits those that their file has so; others as all other weights.
    AsInFile,
    /// In eight bits: those of a network's blocks.
    Eight(EightBits),
}

/// Beginning of the names of weights that [`Matrices::Eight`] is for: those of the transformer's blocks.
const BLOCKS: &str = "blocks.";

impl HostWeight {
    /// The weight `key` as `storage` says. `wide` has its values; `scaled` has them in eight bits, where the file does.
    /// One that stays in its dtype shares its bytes.
    pub fn new(
        storage: Storage,
        key: &str,
        scaled: Option<ScaledRows>,
        wide: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        match (storage.matrices, scaled) {
            (Matrices::AsInFile, Some(rows)) => return Ok(Self::Scaled(rows)),
            (Matrices::Eight(kind), Some(rows)) if rows.kind() == kind => return Ok(Self::Scaled(rows)),
            _ => {}
        }
        let tensor = wide()?;
        match storage.matrices {
            Matrices::Eight(kind) if key.starts_with(BLOCKS) && tensor.shape().len() == 2 => {
                Ok(Self::Scaled(ScaledRows::quantised(&tensor, kind)?))
            }
            _ => Ok(Self::Dense(tensor)),
        }
    }

    /// Puts the weight `key` on `device`, a dense one in the dtype that `storage` says.
    pub fn upload(self, storage: Storage, key: &str, device: &Device) -> Weight {
        match self {
            Self::Dense(tensor) => Weight::new(&tensor, storage.of(key, tensor.dtype()), device),
            Self::Scaled(rows) => Weight::from_scaled(ScaledMatrix::new(rows, device)),
        }
    }
}
