//! Rotary position embedding.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{operator, pull};

/// Rotates neighbouring pairs of each head of `x` `[L, heads * d]` by the angles whose cosine and sine are given,
/// `[L, d / 2]`. The angles are constants: no gradient reaches them.
pub fn rope(x: Tensor<2>, cos: Tensor<2>, sin: Tensor<2>, heads: usize) -> Tensor<2> {
    let [rows, channels] = x.dims();
    let half = channels / heads.max(1) / 2;
    assert!(
        half * heads * 2 == channels && cos.dims() == [rows, half] && sin.dims() == [rows, half],
        "rotation of {heads} heads of {:?} by angles {:?} and {:?}",
        x.dims(),
        cos.dims(),
        sin.dims()
    );
    let (x, cos, sin) = (x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch());
    Tensor::from_dispatch(<Dispatch as RopeOps>::rope(x, cos, sin, heads))
}

/// The rotation as the run-time dispatch calls it. A backend implements [`RopeKernel`] and forwards to it here.
#[backend_extension(Flex, Autodiff)]
pub trait RopeOps: Backend {
    /// See [`rope`].
    fn rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>, heads: usize) -> FloatTensor<Self>;
}

/// The rotation on one backend.
pub trait RopeKernel: Backend {
    /// Rotates by the angles, or `back` by minus the angles, which is also the gradient.
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: usize,
        back: bool,
    ) -> FloatTensor<Self>;
}

impl<B: RopeKernel, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
    fn rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>, heads: usize) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Rotate;
        impl<B: RopeKernel> Backward<B, 1> for Rotate {
            type State = (FloatTensor<B>, FloatTensor<B>, usize);
            fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
                pull::<B, _, 1>(ops, gradients, |(cos, sin, heads), d_y, _| {
                    [Some(B::rotate(d_y, cos, sin, heads, true))]
                });
            }
        }
        let (x, node) = x.into_parts();
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        operator::<_, B, C, 1>(Rotate, [node], || {
            (B::rotate(x, cos.clone(), sin.clone(), heads, false), (cos, sin, heads))
        })
    }
}

#[cfg(feature = "flex")]
mod on_flex {
    use burn::backend::{Flex, TensorMetadata};

    use super::*;
    use crate::ops::flex::Values;
    use crate::ops::kernels::rope::{Turn, rotate};

    impl RopeOps for Flex {
        fn rope(
            x: FloatTensor<Self>,
            cos: FloatTensor<Self>,
            sin: FloatTensor<Self>,
            heads: usize,
        ) -> FloatTensor<Self> {
            Self::rotate(x, cos, sin, heads, false)
        }
    }

    impl RopeKernel for Flex {
        fn rotate(
            x: FloatTensor<Self>,
            cos: FloatTensor<Self>,
            sin: FloatTensor<Self>,
            heads: usize,
            back: bool,
        ) -> FloatTensor<Self> {
            let [rows, _] = x.shape().dims::<2>();
            let (x, cos, sin) = (Values::of(x), Values::of(cos), Values::of(sin));
            let turn = if back { Turn::Back } else { Turn::Forward };
            x.like(rotate(x.slice(), cos.slice(), sin.slice(), rows, heads, turn))
        }
    }
}
