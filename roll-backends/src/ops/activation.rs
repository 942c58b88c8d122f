//! Elementwise activations. The result has the dtype of the operand, f32 or bf16.

use burn_tensor::{DType, Tensor};

use super::Kernels;
use super::expression::Expression;
use super::operator::{Operator, Pullback, call};
use crate::backend::{Backend, TensorMetadata, tensor::FloatTensor as Floats};

/// GELU, tanh approximation.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    call(Activation::GeluTanh, [x.into_dispatch()])
}

/// GELU in its exact form, `x * (1 + erf(x / sqrt(2))) / 2`, accurate to a few 1e-7.
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    call(Activation::Gelu, [x.into_dispatch()])
}

/// `x * sigmoid(x)`.
pub fn silu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    call(Activation::Silu, [x.into_dispatch()])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Gelu,
    GeluTanh,
    Silu,
}

impl Operator<1> for Activation {
    fn record<B: Kernels>(self, [x]: [Floats<B>; 1], _: [bool; 1]) -> (Floats<B>, impl Pullback<B, 1>) {
        let dtype = x.dtype();
        let y = Expression::<B>(B::activation_forward(self, x.clone())).cast(dtype);
        (y.0, move |d_y| [Some(Expression::<B>(B::activation_backward(self, x, d_y)).cast(dtype).0)])
    }
}

/// The activations and their derivatives on one backend. Operands and results are f32 or bf16.
pub trait ActivationKernel: Backend {
    /// Returns the activation of each element of x.
    fn activation_forward(activation: Activation, x: Floats<Self>) -> Floats<Self> {
        let x = Expression::<Self>(x).cast(DType::F32);
        let y = match activation {
            Activation::Gelu => composed_gelu(x),
            Activation::GeluTanh => x.clone() * (gelu_argument(x) * 2.0).sigmoid(),
            Activation::Silu => x.clone() * x.sigmoid(),
        };
        y.0
    }

    /// The gradient of `x`, for the cotangent `d_y` of the result.
    fn activation_backward(activation: Activation, x: Floats<Self>, d_y: Floats<Self>) -> Floats<Self> {
        let [x, d_y] = [x, d_y].map(|x| Expression::<Self>(x).cast(DType::F32));
        // GELU's tanh form and SiLU are x * s with s = sigmoid(v), whose derivative is s + s (1 - s) * (x dv/dx).
        let clamped = x.clone().clamp_abs(SATURATED);
        let (s, x_dv_dx) = match activation {
            Activation::Gelu => return composed_gelu_backward(x, d_y).0,
            Activation::GeluTanh => {
                let slope = (clamped.clone().squared() * (3.0 * GELU_CUBE) + 1.0) * (2.0 * GELU_SCALE);
                ((gelu_argument(x) * 2.0).sigmoid(), clamped * slope)
            }
            Activation::Silu => (x.sigmoid(), clamped),
        };
        let derivative = s.clone() + s.clone() * (s * -1.0 + 1.0) * x_dv_dx;
        (derivative * d_y).0
    }
}

/// Bound of |x| in terms whose other factor, `s (1 - s)` or the normal density, is 0 in f32 beyond it: infinity times 0
/// would be NaN.
const SATURATED: f64 = 100.0;

/// `1 / sqrt(2 pi)`.
const NORMAL_DENSITY: f64 = 0.398_942_280_401_432_7;

/// [`gelu`] composed of primitive operations.
pub(super) fn composed_gelu<B: Backend>(x: Expression<B>) -> Expression<B> {
    x.clone() * normal_cdf(x)
}

/// The gradient of [`gelu`], composed of primitive operations.
pub(super) fn composed_gelu_backward<B: Backend>(x: Expression<B>, d_y: Expression<B>) -> Expression<B> {
    let clamped = x.clone().clamp_abs(SATURATED);
    let density = (clamped.clone().squared() * -0.5).exp() * NORMAL_DENSITY;
    (normal_cdf(x) + clamped * density) * d_y
}

/// The cumulative distribution function of the standard normal distribution.
fn normal_cdf<B: Backend>(x: Expression<B>) -> Expression<B> {
    let erf = Expression::<B>(B::float_erf((x * std::f64::consts::FRAC_1_SQRT_2).0));
    erf * 0.5 + 0.5
}

/// `sqrt(2 / pi)`.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
/// Coefficient of the cubic term of GELU's tanh form.
const GELU_CUBE: f64 = 0.044_715;

/// The argument u of GELU's tanh form, `x * 0.5 (1 + tanh u)`, which equals `x * sigmoid(2 u)`.
fn gelu_argument<B: Backend>(x: Expression<B>) -> Expression<B> {
    x.clone() * (x.squared() * GELU_CUBE + 1.0) * GELU_SCALE
}
