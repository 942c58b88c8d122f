//! Element-wise activations.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{operator, pull};

/// GELU in its tanh form.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ActivationOps>::fused_gelu_tanh(x.into_dispatch()))
}

/// `x * sigmoid(x)`.
pub fn silu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ActivationOps>::fused_silu(x.into_dispatch()))
}

/// The activations as the run-time dispatch calls them. A backend implements [`ActivationKernel`] and forwards to it
/// here.
#[backend_extension(Flex, Autodiff)]
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
    fn activation_forward(activation: Activation, x: FloatTensor<Self>) -> FloatTensor<Self>;
    /// The gradient of x.
    fn activation_backward(activation: Activation, x: FloatTensor<Self>, d_y: FloatTensor<Self>) -> FloatTensor<Self>;
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

#[cfg(feature = "flex")]
mod on_flex {
    use burn::backend::Flex;

    use super::*;
    use crate::ops::flex::Values;
    use crate::ops::kernels::activation as kernels;

    impl ActivationOps for Flex {
        fn fused_gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::activation_forward(Activation::GeluTanh, x)
        }

        fn fused_silu(x: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::activation_forward(Activation::Silu, x)
        }
    }

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
