//! The storage formats of weights, and weights in host memory in the format of a device.

use burn_tensor::{DType, Device};
use half::bf16;
use rayon::prelude::*;
use roll_core::{Result, Tensor};

use super::{SegmentMemory, Weight};
use crate::{EightBits, ScaledMatrix, ScaledRows};

/// The storage of a network's weights: one dtype, with exceptions for weights that need f32 and for eight-bit matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storage {
    /// The dtype of dense weights, f32 or bf16.
    pub dtype: DType,
    /// Prefixes of weights that stay f32 if the file stores them as f32.
    pub exact: &'static [&'static str],
    /// The storage format of matrices.
    pub matrices: MatrixStorage,
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

impl From<DType> for Storage {
    fn from(dtype: DType) -> Self {
        Self { dtype, exact: &[], matrices: MatrixStorage::Dense }
    }
}

impl Storage {
    /// The dtype of the weight `key` if it is dense; `stored` is its dtype in the file.
    pub fn of(&self, key: &str, stored: roll_core::DType) -> DType {
        let is_exact = stored == roll_core::DType::F32 && self.exact.iter().any(|prefix| key.starts_with(prefix));
        if is_exact { DType::F32 } else { self.dtype }
    }
}

/// A weight between file and device.
#[derive(Clone, Debug)]
pub enum HostWeight {
    /// A dense tensor, f32 or bf16.
    Dense(Tensor),
    /// An eight-bit matrix.
    Scaled(ScaledRows),
}

impl HostWeight {
    /// Converts the weight `key` to the format of `storage`. `in_file` is the weight if the file stores it in eight
    /// bits; `read_floats` reads it as floats, and is called if the eight bits of the file cannot be used. A dense
    /// tensor shares the bytes that `read_floats` returns.
    pub fn new(
        storage: Storage,
        key: &str,
        in_file: Option<ScaledRows>,
        read_floats: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Self> {
        match (storage.matrices, in_file) {
            (MatrixStorage::AsInFile, Some(rows)) => return Ok(Self::Scaled(rows)),
            (MatrixStorage::Eight(kind), Some(rows)) if rows.kind() == kind => return Ok(Self::Scaled(rows)),
            _ => {}
        }
        let tensor = read_floats()?;
        match storage.matrices {
            MatrixStorage::Eight(kind) if key.starts_with(BLOCKS) && tensor.shape().len() == 2 => {
                Ok(Self::Scaled(ScaledRows::quantised(&tensor, kind)?))
            }
            _ => Ok(Self::Dense(tensor)),
        }
    }

    /// Uploads the weight `key` to `device`, into `memory` if it has room. A dense weight gets the dtype of `storage`.
    pub fn upload(self, storage: Storage, key: &str, device: &Device, memory: &mut SegmentMemory) -> Weight {
        match self {
            Self::Dense(tensor) => Weight::uploaded(&tensor, storage.of(key, tensor.dtype()), device, memory),
            Self::Scaled(rows) => Weight::from_scaled(ScaledMatrix::uploaded(rows, device, memory)),
        }
    }
}

/// Rounds values to bf16, to nearest with ties to even, as every backend does. f32 values are rounded by all threads.
pub(super) fn narrowed(tensor: &Tensor) -> Vec<bf16> {
    /// Values that a thread rounds at a time.
    const CHUNK: usize = 1 << 16;
    match tensor.as_slice::<f32>() {
        Ok(values) => {
            let mut narrow = vec![bf16::ZERO; values.len()];
            let chunks = narrow.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK));
            chunks.for_each(|(narrow, values)| {
                narrow.iter_mut().zip(values).for_each(|(to, from)| *to = bf16::from_f32(*from));
            });
            narrow
        }
        // Another dtype.
        Err(_) => tensor.to_f32_vec().into_iter().map(bf16::from_f32).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_device_round_to_bf16_alike() {
        let device = crate::device("flex").unwrap();
        let ties = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -1.0 - 1.0 / 256.0, 1e-40, f32::MAX, 0.0];
        let values: Vec<f32> = (0..70_000).map(|i| (i as f32 * 0.37).sin() * 10.0).chain(ties).collect();
        let weight = crate::Weight::new(&Tensor::new(values.clone(), [values.len()]).unwrap(), DType::BF16, &device);
        let stored = weight.stored::<1>().unwrap();
        assert_eq!(stored.dtype(), DType::BF16);
        let cast = burn_tensor::Tensor::<1>::from_data(values.as_slice(), &device).cast(DType::BF16);
        assert_eq!(stored.into_data(), cast.into_data());
    }

    #[test]
    fn exact_weights_stay_f32() {
        let storage = Storage { exact: &["time_", "head."], ..Storage::from(DType::BF16) };
        assert_eq!(storage.of("blocks.0.q.weight", roll_core::DType::F32), DType::BF16);
        assert_eq!(storage.of("time_embedding.0.weight", roll_core::DType::F32), DType::F32);
        assert_eq!(storage.of("head.head.weight", roll_core::DType::Bf16), DType::BF16);
        assert_eq!(Storage::from(DType::BF16).of("head.head.weight", roll_core::DType::F32), DType::BF16);
    }
}
