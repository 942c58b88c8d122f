//! Weight stores: they hold the weights of a network on the device, in host memory, streamed from files, or sharded
//! over the ranks, behind one interface, [`WeightStore`].

mod host_store;
mod prefetch;
mod segment_memory;
mod sharded;
mod storage;
mod swapped;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use burn_tensor::{DType, Device, Int, Tensor, TensorData};
use roll_core::{ParameterSpec, Result, StateDict};

pub use host_store::HostStore;
pub use prefetch::{Pending, Prefetcher};
pub use segment_memory::{SegmentMemory, SegmentSizes};
pub use sharded::Sharded;
pub use storage::{HostWeight, MatrixStorage, Storage};
pub use swapped::{DeviceSlot, Swapped};

use crate::host::values;
use crate::sync::lock;
use crate::{BackendError, BlockMatrix, NdTensor, ParameterSegment, ScaledMatrix, Tape};

/// The weights of one segment of a network, by checkpoint key.
pub type Weights = Arc<HashMap<String, Weight>>;

/// A weight in its storage dtype. Frozen, unless it was created from a leaf of an autodiff graph.
#[derive(Clone, Debug)]
pub struct Weight {
    value: Value,
}

#[derive(Clone, Debug)]
enum Value {
    /// Floats on the device.
    Dense(NdTensor),
    /// A block-quantised matrix in host memory, whose rows are decoded to `device`.
    Blocks { matrix: Arc<BlockMatrix>, shape: [usize; 2], device: Device },
    /// An eight-bit matrix on the device.
    Scaled(ScaledMatrix),
}

impl Weight {
    /// Uploads a host tensor as `dtype`.
    pub fn new(tensor: &roll_core::Tensor, dtype: DType, device: &Device) -> Self {
        Self::uploaded(tensor, dtype, device, &mut SegmentMemory::default())
    }

    /// Like [`Weight::new`], into `memory` if it has room.
    pub fn uploaded(tensor: &roll_core::Tensor, dtype: DType, device: &Device, memory: &mut SegmentMemory) -> Self {
        let flat_shape = [tensor.len()];
        let flat = match (tensor.dtype(), dtype) {
            // Uploaded as it is.
            (roll_core::DType::Bf16, DType::BF16) => {
                memory.upload(Cow::Borrowed(tensor.as_slice::<half::bf16>().unwrap_or(&[])), flat_shape, device)
            }
            // Converted on the host: half the bytes are copied, and no f32 copy exists on the device.
            (_, DType::BF16) => memory.upload(Cow::Owned(storage::narrowed(tensor)), flat_shape, device),
            // Uploaded as f32, and converted on the device if another dtype is requested.
            _ => memory.upload(values(tensor), flat_shape, device).cast(dtype),
        };
        Self::from_tensor(NdTensor::from_flat(flat, tensor.shape()))
    }

    /// Wraps a tensor that is on a device already, e.g. a leaf of an autodiff graph.
    pub fn from_tensor(value: NdTensor) -> Self {
        Self { value: Value::Dense(value) }
    }

    /// Wraps a block-quantised matrix, which stays in host memory. The rows that a pass reads are decoded to `device`.
    pub fn from_blocks(matrix: BlockMatrix, device: &Device) -> Self {
        let shape = matrix.shape();
        Self { value: Value::Blocks { matrix: Arc::new(matrix), shape, device: device.clone() } }
    }

    /// Wraps an eight-bit matrix, on its device.
    pub fn from_scaled(matrix: ScaledMatrix) -> Self {
        Self { value: Value::Scaled(matrix) }
    }

    /// The matrix, if it is block-quantised.
    pub fn blocks(&self) -> Option<&Arc<BlockMatrix>> {
        match &self.value {
            Value::Blocks { matrix, .. } => Some(matrix),
            Value::Dense(_) | Value::Scaled(_) => None,
        }
    }

    /// The matrix, if it is stored in eight bits.
    pub fn scaled(&self) -> Option<&ScaledMatrix> {
        match &self.value {
            Value::Scaled(matrix) => Some(matrix),
            Value::Dense(_) | Value::Blocks { .. } => None,
        }
    }

    /// The value as f32 of rank `D`; other dtypes are converted on each call. Fails if the rank differs.
    pub fn f32<const D: usize>(&self) -> Result<Tensor<D>> {
        let value = self.stored::<D>()?;
        Ok(if value.dtype() == DType::F32 { value } else { value.cast(DType::F32) })
    }

    /// The value of rank `D` in its storage dtype; block-quantised and eight-bit matrices are decoded to f32. Fails if
    /// the rank differs.
    pub fn stored<const D: usize>(&self) -> Result<Tensor<D>> {
        match &self.value {
            Value::Dense(value) => value.rank::<D>(),
            Value::Blocks { .. } | Value::Scaled(_) => NdTensor::from(self.rows(0, self.shape()[0])?).rank::<D>(),
        }
    }

    /// `count` rows of a matrix, in the dtype of [`Weight::stored`]. If the matrix is quantised, only these rows are
    /// decoded.
    pub fn rows(&self, start: usize, count: usize) -> Result<Tensor<2>> {
        match &self.value {
            Value::Dense(value) => Ok(value.rank::<2>()?.narrow(0, start, count)),
            Value::Blocks { matrix, shape, device } => {
                Ok(matrix_of(matrix.decode(start..start + count), [count, shape[1]], device))
            }
            Value::Scaled(matrix) => Ok(matrix.rows(start, count)),
        }
    }

    /// The rows of a matrix with the given indices, in the dtype of [`Weight::stored`].
    pub fn select(&self, rows: Tensor<1, Int>) -> Result<Tensor<2>> {
        match &self.value {
            Value::Dense(value) => Ok(value.rank::<2>()?.select(0, rows)),
            Value::Blocks { matrix, shape, device } => {
                let rows: Vec<usize> = rows.into_data().iter::<i64>().map(|row| row as usize).collect();
                let values = rows.iter().flat_map(|row| matrix.decode(*row..row + 1)).collect();
                Ok(matrix_of(values, [rows.len(), shape[1]], device))
            }
            Value::Scaled(matrix) => Ok(matrix.select(rows)),
        }
    }

    /// Size in memory, in bytes.
    pub fn size(&self) -> usize {
        match &self.value {
            Value::Dense(value) => value.flat().shape().num_elements() * value.flat().dtype().size(),
            Value::Blocks { matrix, .. } => matrix.size(),
            Value::Scaled(matrix) => matrix.size(),
        }
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        match &self.value {
            Value::Dense(value) => value.shape(),
            Value::Blocks { shape, .. } => shape,
            Value::Scaled(matrix) => matrix.shape(),
        }
    }
}

fn matrix_of(values: Vec<f32>, shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// A source of the weights of a network, segment by segment.
pub trait WeightStore: Send + Sync {
    /// Returns all weights whose key starts with `prefix`. The caller drops the returned value when its pass has left
    /// the segment, so that a store may free the weights.
    fn segment(&self, prefix: &str) -> Result<Weights>;

    /// The device of the returned weights, without autodiff.
    fn device(&self) -> &Device;

    /// The shape of a weight; `None` if there is no such key.
    fn shape(&self, key: &str) -> Option<Vec<usize>>;
}

/// A store that keeps all weights on the device.
pub struct Resident {
    device: Device,
    weights: HashMap<String, Weight>,
    /// The segments requested so far, by prefix; their weights share the values of `weights`.
    segments: std::sync::Mutex<HashMap<String, Weights>>,
}

impl Resident {
    /// Uploads `state` as dense weights, in the dtypes of `storage`.
    pub fn new(state: &StateDict, storage: impl Into<Storage>, device: &Device) -> Self {
        let storage = storage.into();
        let weight =
            |(k, t): (&String, &roll_core::Tensor)| (k.clone(), Weight::new(t, storage.of(k, t.dtype()), device));
        let weights = state.iter().map(weight).collect();
        Self { device: device.clone(), weights, segments: Default::default() }
    }

    /// Takes weights that are on `device` already.
    pub fn from_weights(weights: HashMap<String, Weight>, device: &Device) -> Self {
        Self { device: device.clone(), weights, segments: Default::default() }
    }

    /// Creates a store of the parameters of `segment`, recorded on `tape`. If the tape is on, a network that reads its
    /// weights from this store runs inside the tape's autodiff graph and can be trained.
    pub fn tracked(segment: &ParameterSegment, tape: &Tape) -> Self {
        let weight = |(index, spec, value): (usize, &ParameterSpec, &Tensor<1>)| {
            let leaf = NdTensor::from_flat(tape.leaf(index, value), spec.shape.as_slice());
            (spec.name.clone(), Weight::from_tensor(leaf))
        };
        let device = segment.parameters().device().clone();
        Self { device, weights: segment.iter().map(weight).collect(), segments: Default::default() }
    }
}

impl WeightStore for Resident {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let mut segments = lock(&self.segments);
        if let Some(found) = segments.get(prefix) {
            return Ok(found.clone());
        }
        let in_segment = self.weights.iter().filter(|(key, _)| key.starts_with(prefix));
        let segment: Weights = Arc::new(in_segment.map(|(key, weight)| (key.clone(), weight.clone())).collect());
        segments.insert(prefix.to_string(), segment.clone());
        Ok(segment)
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn shape(&self, key: &str) -> Option<Vec<usize>> {
        self.weights.get(key).map(|w| w.shape().to_vec())
    }
}

/// Returns the weight `key`. Fails with an error that names the key.
pub fn get<'a>(weights: &'a Weights, key: &str) -> Result<&'a Weight> {
    weights.get(key).ok_or_else(|| BackendError::MissingWeight { name: key.into() }.into())
}
