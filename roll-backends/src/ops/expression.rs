//! Arithmetic on a backend's primitive tensors, in which the default kernels are written. Kernels run below Burn's
//! dispatch, on the primitives of one backend, where `Tensor` of Burn cannot be used.

use std::ops::{Add, Div, Mul, Range, Sub};

use burn_tensor::{DType, FloatDType, Shape, Slice};

use crate::backend::{Backend, TensorMetadata, tensor::FloatTensor as Floats};

/// A float tensor of the backend `B`. Like Burn's, operations are evaluated at once and broadcast axes of length one.
pub struct Expression<B: Backend>(pub Floats<B>);

impl<B: Backend> Clone for Expression<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Backend> Expression<B> {
    /// The shape; panics unless the rank is `D`.
    pub fn dims<const D: usize>(&self) -> [usize; D] {
        self.0.shape().dims::<D>()
    }

    pub fn is_empty(&self) -> bool {
        self.0.shape().num_elements() == 0
    }

    pub fn dtype(&self) -> DType {
        self.0.dtype()
    }

    /// Casts to `dtype`; a no-op if it is the dtype already.
    pub fn cast(self, dtype: DType) -> Self {
        if self.dtype() == dtype { self } else { Self(B::float_cast(self.0, FloatDType::from(dtype))) }
    }

    /// Reshapes, row-major.
    pub fn reshape<const D: usize>(self, shape: [usize; D]) -> Self {
        Self(B::float_reshape(self.0, Shape::new(shape)))
    }

    pub fn swap(self, a: usize, b: usize) -> Self {
        Self(B::float_swap_dims(self.0, a, b))
    }

    /// Swaps the last two axes.
    pub fn t(self) -> Self {
        Self(B::float_transpose(self.0))
    }

    /// Slices an axis. `range` must not be empty.
    pub fn narrow(self, axis: usize, range: Range<usize>) -> Self {
        let shape = self.0.shape();
        let slices: Vec<Slice> = (0..shape.num_dims())
            .map(|i| if i == axis { Slice::from(range.clone()) } else { Slice::from(0..shape[i]) })
            .collect();
        Self(B::float_slice(self.0, &slices))
    }

    /// Concatenates tensors along an axis.
    pub fn cat(parts: Vec<Self>, axis: usize) -> Self {
        Self(B::float_cat(parts.into_iter().map(|part| part.0).collect(), axis))
    }

    /// f32 zeros of `shape` on the same device.
    pub fn zeros<const D: usize>(&self, shape: [usize; D]) -> Self {
        Self(B::float_zeros(Shape::new(shape), &self.0.device(), FloatDType::F32))
    }

    /// Sum over an axis, which is kept with length one.
    pub fn sum(self, axis: usize) -> Self {
        Self(B::float_sum_dim(self.0, axis))
    }

    /// Mean over an axis, which is kept with length one.
    pub fn mean(self, axis: usize) -> Self {
        Self(B::float_mean_dim(self.0, axis))
    }

    /// Maximum over an axis, which is kept with length one.
    pub fn max(self, axis: usize) -> Self {
        Self(B::float_max_dim(self.0, axis))
    }

    pub fn exp(self) -> Self {
        Self(B::float_exp(self.0))
    }

    pub fn sqrt(self) -> Self {
        Self(B::float_sqrt(self.0))
    }

    pub fn recip(self) -> Self {
        Self(B::float_recip(self.0))
    }

    pub fn tanh(self) -> Self {
        Self(B::float_tanh(self.0))
    }

    pub fn squared(self) -> Self {
        self.clone() * self
    }

    pub fn abs(self) -> Self {
        Self(B::float_abs(self.0))
    }

    /// -1, 0 or 1.
    pub fn sign(self) -> Self {
        Self(B::float_sign(self.0))
    }

    /// Rounds to the nearest integer, ties to even.
    pub fn round(self) -> Self {
        Self(B::float_round(self.0))
    }

    pub fn clamp_min(self, min: f64) -> Self {
        Self(B::float_clamp_min(self.0, min.into()))
    }

    /// Clamps to `-max..=max`.
    pub fn clamp_abs(self, max: f64) -> Self {
        Self(B::float_clamp(self.0, (-max).into(), max.into()))
    }

    /// `1 / (1 + exp(-x))`.
    pub fn sigmoid(self) -> Self {
        // A large negative x makes the exponential infinite, and its reciprocal is 0 as it should be.
        ((self * -1.0).exp() + 1.0).recip()
    }
}

/// Implements operators: each line names the operator's trait and method, the function of [`Backend`] for two tensors
/// and, optionally, the one for a tensor and a number.
macro_rules! operators {
    ($($operator:ident $method:ident $tensors:ident $($number:ident)?;)*) => {$(
        impl<B: Backend> $operator for Expression<B> {
            type Output = Self;
            fn $method(self, other: Self) -> Self {
                Self(B::$tensors(self.0, other.0))
            }
        }

        $(impl<B: Backend> $operator<f64> for Expression<B> {
            type Output = Self;
            fn $method(self, other: f64) -> Self {
                Self(B::$number(self.0, other.into()))
            }
        })?
    )*};
}

operators! {
    Add add float_add float_add_scalar;
    Sub sub float_sub;
    Mul mul float_mul float_mul_scalar;
    Div div float_div float_div_scalar;
}

/// Returns the gradient of an operand that has either as many rows as the result, or one row that all rows of the
/// result share (`is_shared`). `d` is the gradient at each row of the result.
pub fn sum_if_shared<B: Backend>(d: Expression<B>, is_shared: bool) -> Expression<B> {
    if is_shared { d.sum(0) } else { d }
}
