//! Element-wise activations.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::expression::Expression;
use super::{operator, pull};

/// GELU in its tanh form.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ActivationOps>::fused_gelu_tanh(x.into_dispatch()))
}

/// `x * sigmoid(x)`.
pub fn silu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ActivationOps>::fused_silu(x.into_dispatch()))
}

/// The activations as the run-time dispatch calls them. A backend implements [`ActivationKernel`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    LibTorch: cfg(feature = "libtorch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait ActivationOps: Backend {
    /// See [`gelu_tanh`].
    fn fused_gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`silu`].
    fn fused_silu(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Which activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// [`gelu_tanh`].
    GeluTanh,
    /// [`silu`].
    Silu,
}

/// The activations and their derivatives on one backend.
pub trait ActivationKernel: Backend {
    /// The function.
    fn activation_forward(activation: Activation, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = Expression::<Self>(x);
        let y = match activation {
            Activation::GeluTanh => x.clone() * (gelu_argument(x) * 2.0).sigmoid(),
            Activation::Silu => x.clone() * x.sigmoid(),
        };
        y.0
    }

    /// The gradient of x.
    fn activation_backward(activation: Activation, x: FloatTensor<Self>, d_y: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, d_y) = (Expression::<Self>(x), Expression(d_y));
        // Both are x * sigmoid(u), and d sigmoid / du = s (1 - s), which is 0 where x is beyond the bound.
        let near = x.clone().within(100.0);
        let (s, inner) = match activation {
            Activation::GeluTanh => {
                let slope = (near.clone().squared() * (3.0 * GELU_CUBE) + 1.0) * (2.0 * GELU_SCALE);
                ((gelu_argument(x) * 2.0).sigmoid(), near * slope)
            }
            Activation::Silu => (x.sigmoid(), near),
        };
        let derivative = s.clone() + s.clone() * (s * -1.0 + 1.0) * inner;
        (derivative * d_y).0
    }
}

/// sqrt(2 / pi).
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBE: f64 = 0.044_715;

/// What the tanh of GELU is taken of: `0.5 (1 + tanh u)` is `sigmoid(2 u)`.
fn gelu_argument<B: Backend>(x: Expression<B>) -> Expression<B> {
    x.clone() * (x.squared() * GELU_CUBE + 1.0) * GELU_SCALE
}

impl<B: ActivationKernel> ActivationOps for B {
    fn fused_gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::activation_forward(Activation::GeluTanh, x)
    }

    fn fused_silu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::activation_forward(Activation::Silu, x)
    }
}

impl<B: ActivationKernel, C: CheckpointStrategy> ActivationOps for Autodiff<B, C> {
    fn fused_gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        tracked::<B, C>(Activation::GeluTanh, x)
    }

    fn fused_silu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        tracked::<B, C>(Activation::Silu, x)
    }
}

fn tracked<B: ActivationKernel, C: CheckpointStrategy>(
    activation: Activation,
    x: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct Apply;
    impl<B: ActivationKernel> Backward<B, 1> for Apply {
        type State = (Activation, FloatTensor<B>);
        fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
            pull::<B, _, 1>(ops, gradients, |(activation, x), d_y, _| {
                [Some(B::activation_backward(activation, x, d_y))]
            });
        }
    }
    let (x, node) = x.into_parts();
    operator::<_, B, C, 1>(Apply, [node], || (B::activation_forward(activation, x.clone()), (activation, x)))
}

#[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
mod on_flex {
    use burn::backend::Flex;

    use super::*;
    use crate::ops::flex::Values;
    use crate::ops::kernels::activation as kernels;

    impl ActivationKernel for Flex {
        fn activation_forward(activation: Activation, x: FloatTensor<Self>) -> FloatTensor<Self> {
            let x = Values::of(x);
            x.like(kernels::forward(kernel(activation), x.slice()))
        }

        fn activation_backward(
            activation: Activation,
            x: FloatTensor<Self>,
            d_y: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let (x, d_y) = (Values::of(x), Values::of(d_y));
            x.like(kernels::backward(kernel(activation), x.slice(), d_y.slice()))
        }
    }

    fn kernel(activation: Activation) -> kernels::Activation {
        match activation {
            Activation::GeluTanh => kernels::Activation::GeluTanh,
            Activation::Silu => kernels::Activation::Silu,
        }
    }
}
