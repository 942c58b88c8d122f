//! Tensors whose rank is known at run time only.

use burn::tensor::{DType, Device, Tensor};
use roll_core::Result;

use crate::BackendError;

/// A float tensor with its shape beside it, row-major. Burn's tensors carry their rank in the type; this one crosses
/// between segments, caches and ONNX nodes, whose ranks differ.
#[derive(Clone, Debug)]
pub struct NdTensor {
    flat: Tensor<1>,
    shape: Vec<usize>,
}

impl NdTensor {
    /// From flat values. The number of elements must be the product of `shape`.
    pub fn from_flat(flat: Tensor<1>, shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        debug_assert_eq!(flat.dims()[0], shape.iter().product::<usize>());
        Self { flat, shape }
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The flat values.
    pub fn flat(&self) -> &Tensor<1> {
        &self.flat
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.flat.device()
    }

    /// As a tensor of rank `D`. Fails when the rank is another.
    pub fn rank<const D: usize>(&self) -> Result<Tensor<D>> {
        let shape: [usize; D] = self.shape.as_slice().try_into().map_err(|_| BackendError::Rank {
            what: "tensor".into(),
            expected: D,
            found: self.shape.clone(),
        })?;
        Ok(self.flat.clone().reshape(shape))
    }

    /// The same values as `dtype`, shared where it is theirs.
    pub fn cast(&self, dtype: DType) -> Self {
        let flat = match self.flat.dtype() == dtype {
            true => self.flat.clone(),
            false => self.flat.clone().cast(dtype),
        };
        Self { flat, shape: self.shape.clone() }
    }

    /// A leaf of a new autodiff graph with the same values.
    pub fn tracked(&self) -> Self {
        Self { flat: self.flat.clone().autodiff().require_grad(), shape: self.shape.clone() }
    }

    /// The same values outside any autodiff graph.
    pub fn untracked(self) -> Self {
        match self.flat.device().is_autodiff() {
            true => Self { flat: self.flat.inner(), shape: self.shape },
            false => self,
        }
    }

    /// Sum of two tensors of one shape.
    pub fn plus(self, other: Self) -> Self {
        debug_assert_eq!(self.shape, other.shape);
        Self { flat: self.flat + other.flat, shape: self.shape }
    }
}

impl<const D: usize> From<Tensor<D>> for NdTensor {
    fn from(tensor: Tensor<D>) -> Self {
        let shape = tensor.dims().to_vec();
        let n = shape.iter().product::<usize>();
        Self { flat: tensor.reshape([n]), shape }
    }
}
