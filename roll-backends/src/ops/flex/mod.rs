//! Operators on flex, Burn's CPU backend: they call [`super::kernels`] on the host slices of its tensors.
//!
//! [`super`] documents shapes and formulas. This folder converts between flex's tensors and slices; the arithmetic is
//! in the kernels.

mod attention;
mod conv;
mod conv2d;
mod decode;
mod elementwise;
mod linear;
mod max_pool;
mod norm;
mod quantised;

use burn_tensor::{Bytes, DType, FloatDType, Shape};

use crate::backend::Flex;
use crate::backend::flex::{FlexTensor, Layout};
use crate::backend::ops::FloatTensorOps;

impl super::AdamKernel for Flex {}
impl super::ProductKernel for Flex {}
impl super::RmsRopeKernel for Flex {}

/// A contiguous f32 tensor. bf16 is converted to f32.
struct Values(FlexTensor);

impl Values {
    /// Converts a tensor; copies it unless it is contiguous f32. Panics, as Burn's own operators do, unless the dtype
    /// is f32 or bf16.
    fn of(tensor: FlexTensor) -> Self {
        let tensor = match tensor.dtype() {
            DType::BF16 => Flex::float_cast(tensor, FloatDType::F32),
            _ => tensor,
        };
        Self(tensor.to_contiguous())
    }

    /// The elements, row-major.
    fn slice(&self) -> &[f32] {
        let n = self.0.layout().num_elements();
        &self.0.storage::<f32>()[self.0.layout().start_offset()..][..n]
    }

    /// A tensor of `values` in this tensor's shape.
    fn like(&self, values: Vec<f32>) -> FlexTensor {
        tensor(values, self.0.layout().shape().clone())
    }
}

fn cast(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    if tensor.dtype() == dtype { tensor } else { Flex::float_cast(tensor, FloatDType::from(dtype)) }
}

/// A contiguous f32 tensor of `values`.
fn tensor(values: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape.into()), DType::F32)
}
