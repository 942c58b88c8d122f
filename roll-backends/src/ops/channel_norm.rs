//! The RMS norm of the Wan VAE.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{operator, pull};

/// `x / max(|x|, 1e-12) * sqrt(C) * gain`, the norm taken over the channels of `[C, T, H, W]`: the RMS norm of the
/// Wan VAE.
pub fn channel_norm(x: Tensor<4>, gain: Tensor<1>) -> Tensor<4> {
    normalise(x, gain, false)
}

/// [`channel_norm`], then `y * sigmoid(y)`, in one pass.
pub fn channel_norm_silu(x: Tensor<4>, gain: Tensor<1>) -> Tensor<4> {
    normalise(x, gain, true)
}

fn normalise(x: Tensor<4>, gain: Tensor<1>, silu: bool) -> Tensor<4> {
    assert_eq!([x.dims()[0]], gain.dims(), "the gain of a channel norm of {:?}", x.dims());
    Tensor::from_dispatch(<Dispatch as ChannelNormOps>::channel_norm(x.into_dispatch(), gain.into_dispatch(), silu))
}

/// The norm as the run-time dispatch calls it. A backend implements [`ChannelNormKernel`] and forwards to it here.
#[backend_extension(Flex, Autodiff)]
pub trait ChannelNormOps: Backend {
    /// See [`channel_norm`] and [`channel_norm_silu`].
    fn channel_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, silu: bool) -> FloatTensor<Self>;
}

/// The norm and its gradients on one backend.
pub trait ChannelNormKernel: Backend {
    /// The result, and `sqrt(C) / max(|x|, 1e-12)` of each position.
    fn channel_norm_forward(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        silu: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The wanted ones of the gradients of x and gain.
    fn channel_norm_backward(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        silu: bool,
        d_y: FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2];
}

impl<B: ChannelNormKernel, C: CheckpointStrategy> ChannelNormOps for Autodiff<B, C> {
    fn channel_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, silu: bool) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct ChannelNorm;
        impl<B: ChannelNormKernel> Backward<B, 2> for ChannelNorm {
            type State = ([FloatTensor<B>; 3], bool);
            fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
                pull::<B, _, 2>(ops, gradients, |([x, gain, factors], silu), d_y, wanted| {
                    B::channel_norm_backward(x, gain, factors, silu, d_y, wanted)
                });
            }
        }
        let ((x, x_node), (gain, gain_node)) = (x.into_parts(), gain.into_parts());
        operator::<_, B, C, 2>(ChannelNorm, [x_node, gain_node], || {
            let (y, factors) = B::channel_norm_forward(x.clone(), gain.clone(), silu);
            (y, ([x, gain, factors], silu))
        })
    }
}

#[cfg(feature = "flex")]
mod on_flex {
    use burn::backend::Flex;

    use super::*;
    use crate::ops::flex::{Values, tensor};
    use crate::ops::kernels::channel_norm::{Then, backward, forward};

    impl ChannelNormOps for Flex {
        fn channel_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, silu: bool) -> FloatTensor<Self> {
            Self::channel_norm_forward(x, gain, silu).0
        }
    }

    impl ChannelNormKernel for Flex {
        fn channel_norm_forward(
            x: FloatTensor<Self>,
            gain: FloatTensor<Self>,
            silu: bool,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let (x, gain) = (Values::of(x), Values::of(gain));
            let (y, factors) = forward(x.slice(), gain.slice(), then(silu));
            let positions = factors.len();
            (x.like(y), tensor(factors, [positions]))
        }

        fn channel_norm_backward(
            x: FloatTensor<Self>,
            gain: FloatTensor<Self>,
            factors: FloatTensor<Self>,
            silu: bool,
            d_y: FloatTensor<Self>,
            wanted: [bool; 2],
        ) -> [Option<FloatTensor<Self>>; 2] {
            let (x, gain, factors, d_y) = (Values::of(x), Values::of(gain), Values::of(factors), Values::of(d_y));
            let [d_x, d_gain] = backward(x.slice(), gain.slice(), factors.slice(), d_y.slice(), then(silu), wanted);
            [d_x.map(|d| x.like(d)), d_gain.map(|d| gain.like(d))]
        }
    }

    fn then(silu: bool) -> Then {
        if silu { Then::Silu } else { Then::Nothing }
    }
}
