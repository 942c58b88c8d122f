//! Formulas over the tensors of any backend, as the kernels without a host path write them.

use std::ops::{Add, Mul, Range, Sub};

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType, Shape, Slice};

/// A float tensor of the backend `B`. Operations broadcast axes of length one, as Burn's do.
pub struct Expression<B: Backend>(pub FloatTensor<B>);

impl<B: Backend> Clone for Expression<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Backend> Expression<B> {
    /// The shape, of rank `D`.
    pub fn dims<const D: usize>(&self) -> [usize; D] {
        self.0.shape().dims::<D>()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.0.shape().num_elements() == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype()
    }

    /// As `dtype`; itself, if it is that already.
    pub fn cast(self, dtype: DType) -> Self {
        if self.dtype() == dtype { self } else { Self(B::float_cast(self.0, FloatDType::from(dtype))) }
    }

    /// Row-major, of another shape.
    pub fn reshape<const D: usize>(self, shape: [usize; D]) -> Self {
        Self(B::float_reshape(self.0, Shape::new(shape)))
    }

    /// With two axes exchanged.
    pub fn swap(self, a: usize, b: usize) -> Self {
        Self(B::float_swap_dims(self.0, a, b))
    }

    /// With the last two axes exchanged.
    pub fn t(self) -> Self {
        Self(B::float_transpose(self.0))
    }

    /// The part `range` of an axis. It must not be empty.
    pub fn narrow(self, axis: usize, range: Range<usize>) -> Self {
        let shape = self.0.shape();
        let slices: Vec<Slice> = (0..shape.num_dims())
            .map(|i| if i == axis { Slice::from(range.clone()) } else { Slice::from(0..shape[i]) })
            .collect();
        Self(B::float_slice(self.0, &slices))
    }

    /// Tensors one after the other along an axis.
    pub fn cat(parts: Vec<Self>, axis: usize) -> Self {
        Self(B::float_cat(parts.into_iter().map(|part| part.0).collect(), axis))
    }

    /// Zeros of a shape and of f32, where `self` is.
    pub fn zeros<const D: usize>(&self, shape: [usize; D]) -> Self {
        Self(B::float_zeros(Shape::new(shape), &self.0.device(), FloatDType::F32))
    }

    /// Sum over an axis, which stays with length one.
    pub fn sum(self, axis: usize) -> Self {
        Self(B::float_sum_dim(self.0, axis))
    }

    /// Mean over an axis, which stays with length one.
    pub fn mean(self, axis: usize) -> Self {
        Self(B::float_mean_dim(self.0, axis))
    }

    /// Largest value along an axis, which stays with length one.
    pub fn max(self, axis: usize) -> Self {
        Self(B::float_max_dim(self.0, axis))
    }

    /// The exponential.
    pub fn exp(self) -> Self {
        Self(B::float_exp(self.0))
    }

    /// The square root.
    pub fn sqrt(self) -> Self {
        Self(B::float_sqrt(self.0))
    }

    /// One over it.
    pub fn recip(self) -> Self {
        Self(B::float_recip(self.0))
    }

    /// Divided by `divisor`.
    pub fn divided(self, divisor: Self) -> Self {
        Self(B::float_div(self.0, divisor.0))
    }

    /// Divided by a number.
    pub fn over(self, divisor: f64) -> Self {
        Self(B::float_div_scalar(self.0, divisor.into()))
    }

    /// The hyperbolic tangent.
    pub fn tanh(self) -> Self {
        Self(B::float_tanh(self.0))
    }

    /// Its square.
    pub fn squared(self) -> Self {
        self.clone() * self
    }

    /// At least `least`.
    pub fn at_least(self, least: f64) -> Self {
        Self(B::float_clamp_min(self.0, least.into()))
    }

    /// Between `-most` and `most`.
    pub fn within(self, most: f64) -> Self {
        Self(B::float_clamp(self.0, (-most).into(), most.into()))
    }

    /// `1 / (1 + exp(-x))`.
    pub fn sigmoid(self) -> Self {
        // Of a large negative x the exponential is infinite, and one over it is 0, as it should be.
        ((self * -1.0).exp() + 1.0).recip()
    }
}

impl<B: Backend> Add for Expression<B> {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(B::float_add(self.0, other.0))
    }
}

impl<B: Backend> Sub for Expression<B> {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(B::float_sub(self.0, other.0))
    }
}

impl<B: Backend> Mul for Expression<B> {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        Self(B::float_mul(self.0, other.0))
    }
}

impl<B: Backend> Add<f64> for Expression<B> {
    type Output = Self;
    fn add(self, other: f64) -> Self {
        Self(B::float_add_scalar(self.0, other.into()))
    }
}

impl<B: Backend> Mul<f64> for Expression<B> {
    type Output = Self;
    fn mul(self, other: f64) -> Self {
        Self(B::float_mul_scalar(self.0, other.into()))
    }
}

/// The gradient of a row operand, given that of each row: their sum where all rows shared it.
pub fn summed_rows<B: Backend>(d: Expression<B>, shared: bool) -> Expression<B> {
    if shared { d.sum(0) } else { d }
}
