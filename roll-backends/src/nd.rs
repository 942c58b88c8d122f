//! Tensors whose rank is only known at run time.

use burn_tensor::{DType, Device, Tensor};
use roll_core::Result;

use crate::BackendError;

/// A float tensor of dynamic rank: flat row-major values and a shape. The rank of Burn's tensors is part of their type;
/// this type passes between segments, caches and ONNX nodes, whose ranks differ.
#[derive(Clone, Debug)]
pub struct NdTensor {
    flat: Tensor<1>,
    shape: Vec<usize>,
}

impl NdTensor {
    /// Creates a tensor from flat values. Their number must be the product of `shape` (checked in debug builds).
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

    /// Reshapes to a Burn tensor of rank `D`. Fails if the rank differs.
    pub fn rank<const D: usize>(&self) -> Result<Tensor<D>> {
        let shape: [usize; D] = self.shape.as_slice().try_into().map_err(|_| BackendError::Rank {
            what: "tensor".into(),
            expected: D,
            found: self.shape.clone(),
        })?;
        Ok(self.flat.clone().reshape(shape))
    }

    /// Casts to `dtype`; shares the values if they already have it.
    pub fn cast(&self, dtype: DType) -> Self {
        let flat = self.flat.clone();
        let flat = if flat.dtype() == dtype { flat } else { flat.cast(dtype) };
        Self { flat, shape: self.shape.clone() }
    }

    /// Starts a new autodiff graph with these values as a leaf.
    pub fn tracked(&self) -> Self {
        Self { flat: self.flat.clone().autodiff().require_grad(), shape: self.shape.clone() }
    }

    /// Detaches the values from any autodiff graph.
    pub fn untracked(self) -> Self {
        if !self.flat.device().is_autodiff() {
            return self;
        }
        Self { flat: self.flat.inner(), shape: self.shape }
    }

    /// The elementwise sum of two tensors of the same shape.
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
