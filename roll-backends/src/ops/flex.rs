//! Flex tensors as slices and back.

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};

/// An f32 tensor whose elements lie in order.
pub struct Values(FlexTensor);

impl Values {
    /// Copies only what does not lie in order. Panics, as Burn's own operators do, unless the dtype is f32.
    pub fn of(tensor: FlexTensor) -> Self {
        Self(tensor.to_contiguous())
    }

    /// The elements, row-major.
    pub fn slice(&self) -> &[f32] {
        let n = self.0.layout().num_elements();
        &self.0.storage::<f32>()[self.0.layout().start_offset()..][..n]
    }

    /// A tensor of this one's shape.
    pub fn like(&self, values: Vec<f32>) -> FlexTensor {
        tensor(values, self.0.layout().shape().clone())
    }
}

/// A tensor of `values`.
pub fn tensor(values: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape.into()), DType::F32)
}
