//! Layer norm and RMS norm.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::expression::{Expression, summed_rows};
use super::{assert_row_operand, operator, pull};

/// `(x - mean) / sqrt(var + eps) * gain + shift` over the last axis of `[L, D]`; gain and shift are `[1, D]` or
/// `[L, D]`.
pub fn layer_norm(x: Tensor<2>, gain: Tensor<2>, shift: Tensor<2>, eps: f64) -> Tensor<2> {
    assert_row_operand("the gain of a layer norm", &gain, &x);
    assert_row_operand("the shift of a layer norm", &shift, &x);
    let (x, gain, shift) = (x.into_dispatch(), gain.into_dispatch(), shift.into_dispatch());
    Tensor::from_dispatch(<Dispatch as NormOps>::fused_layer_norm(x, gain, shift, eps))
}

/// `x / sqrt(mean(x^2) + eps) * gain` over the last axis of `[L, D]`.
pub fn rms_norm(x: Tensor<2>, gain: Tensor<1>, eps: f64) -> Tensor<2> {
    let gain: Tensor<2> = gain.unsqueeze();
    assert_row_operand("the gain of an RMS norm", &gain, &x);
    Tensor::from_dispatch(<Dispatch as NormOps>::fused_rms_norm(x.into_dispatch(), gain.into_dispatch(), eps))
}

/// The norms as the run-time dispatch calls them. A backend implements [`NormKernel`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    LibTorch: cfg(feature = "libtorch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait NormOps: Backend {
    /// See [`layer_norm`].
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        shift: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;

    /// See [`rms_norm`]; gain is `[1, D]` here.
    fn fused_rms_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;
}

/// The norms and their gradients on one backend. A norm with a shift is a layer norm, one without an RMS norm.
pub trait NormKernel: Backend {
    /// The result, and mean and inverse deviation of each row (in the backend's own layout).
    fn norm_forward(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        shift: Option<FloatTensor<Self>>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, gain) = (Expression::<Self>(x), Expression(gain));
        let mean = shift.is_some().then(|| x.clone().mean(1));
        let x = match mean.clone() {
            Some(mean) => x - mean,
            None => x,
        };
        let inverse = (x.clone().squared().mean(1) + eps).sqrt().recip();
        let y = x * inverse.clone() * gain;
        let y = match shift {
            Some(shift) => y + Expression(shift),
            None => y,
        };
        let moments = Expression::cat(mean.into_iter().chain([inverse]).collect(), 1);
        (y.0, moments.0)
    }

    /// The wanted ones of the gradients of x, gain and shift, each of its operand's shape.
    fn norm_backward(
        saved: SavedNorm<FloatTensor<Self>>,
        d_y: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3] {
        composed_backward::<Self>(saved, d_y, wanted)
    }
}

/// [`NormKernel::norm_backward`] in the operations of any backend; moments are mean and inverse deviation, or the latter
/// alone where there is no mean.
pub(super) fn composed_backward<B: NormKernel>(
    saved: SavedNorm<FloatTensor<B>>,
    d_y: FloatTensor<B>,
    wanted: [bool; 3],
) -> [Option<FloatTensor<B>>; 3] {
    let (x, gain, moments) = (Expression::<B>(saved.x), Expression(saved.gain), Expression(saved.moments));
    let d_y = Expression(d_y);
    let [_, count]: [usize; 2] = moments.dims();
    let inverse = moments.clone().narrow(1, count - 1..count);
    let x = match saved.layer {
        Some(_) => x - moments.narrow(1, 0..1),
        None => x,
    };
    let normed = x * inverse.clone();
    let shared = gain.dims::<2>()[0] == 1;
    let d_gain = wanted[1].then(|| summed_rows(normed.clone() * d_y.clone(), shared).0);
    let d_shift = saved.layer.filter(|_| wanted[2]).map(|SharedShift(shared)| summed_rows(d_y.clone(), shared).0);
    let d_x = wanted[0].then(|| {
        let d_normed = d_y * gain;
        let along = (normed.clone() * d_normed.clone()).mean(1);
        let rest = match saved.layer {
            Some(_) => d_normed.clone() - d_normed.mean(1),
            None => d_normed,
        };
        ((rest - normed * along) * inverse).0
    });
    [d_x, d_gain, d_shift]
}

impl<B: NormKernel> NormOps for B {
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        shift: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self> {
        Self::norm_forward(x, gain, Some(shift), eps).0
    }

    fn fused_rms_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        Self::norm_forward(x, gain, None, eps).0
    }
}

/// What the backward of a norm needs.
#[derive(Clone, Debug)]
pub struct SavedNorm<T> {
    /// The operand.
    pub x: T,
    /// `[1, D]` or `[L, D]`.
    pub gain: T,
    /// Of each row.
    pub moments: T,
    /// Whether the mean was taken out too, and if so whether the shift is one row for all.
    pub layer: Option<SharedShift>,
    /// Epsilon.
    pub eps: f64,
}

/// Whether the shift of a layer norm is `[1, D]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedShift(pub bool);

impl<B: NormKernel, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        shift: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct LayerNorm;
        impl<B: NormKernel> Backward<B, 3> for LayerNorm {
            type State = SavedNorm<FloatTensor<B>>;
            fn backward(self, ops: Ops<Self::State, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
                pull::<B, _, 3>(ops, gradients, B::norm_backward);
            }
        }
        let ((x, x_node), (gain, gain_node), (shift, shift_node)) =
            (x.into_parts(), gain.into_parts(), shift.into_parts());
        operator::<_, B, C, 3>(LayerNorm, [x_node, gain_node, shift_node], || {
            let layer = Some(SharedShift(burn::backend::TensorMetadata::shape(&shift).dims::<2>()[0] == 1));
            let (y, moments) = B::norm_forward(x.clone(), gain.clone(), Some(shift), eps);
            (y, SavedNorm { x, gain, moments, layer, eps })
        })
    }

    fn fused_rms_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct RmsNorm;
        impl<B: NormKernel> Backward<B, 2> for RmsNorm {
            type State = SavedNorm<FloatTensor<B>>;
            fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
                pull::<B, _, 2>(ops, gradients, |saved, d_y, [x, gain]| {
                    let [d_x, d_gain, _] = B::norm_backward(saved, d_y, [x, gain, false]);
                    [d_x, d_gain]
                });
            }
        }
        let ((x, x_node), (gain, gain_node)) = (x.into_parts(), gain.into_parts());
        operator::<_, B, C, 2>(RmsNorm, [x_node, gain_node], || {
            let (y, moments) = B::norm_forward(x.clone(), gain.clone(), None, eps);
            (y, SavedNorm { x, gain, moments, layer: None, eps })
        })
    }
}

#[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
mod on_flex {
    use burn::backend::{Flex, TensorMetadata};

    use super::*;
    use crate::ops::flex::{Values, tensor};
    use crate::ops::kernels::norm::{self, Norm};
    use crate::ops::kernels::rows::RowOperand;

    impl NormKernel for Flex {
        fn norm_forward(
            x: FloatTensor<Self>,
            gain: FloatTensor<Self>,
            shift: Option<FloatTensor<Self>>,
            eps: f64,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            let [rows, width] = x.shape().dims::<2>();
            let (x, gain, shift) = (Values::of(x), Values::of(gain), shift.map(Values::of));
            let norm = if shift.is_some() { Norm::Layer } else { Norm::Rms };
            let gain = RowOperand::new(gain.slice(), rows, width);
            let shift = shift.as_ref().map(|shift| RowOperand::new(shift.slice(), rows, width));
            let (y, moments) = norm::forward(norm, x.slice(), rows, gain, shift, eps);
            (x.like(y), tensor(bytemuck::cast_slice(&moments).to_vec(), [rows, 2]))
        }

        fn norm_backward(
            saved: SavedNorm<FloatTensor<Self>>,
            d_y: FloatTensor<Self>,
            wanted: [bool; 3],
        ) -> [Option<FloatTensor<Self>>; 3] {
            let [rows, width] = saved.x.shape().dims::<2>();
            let kind = if saved.layer.is_some() { Norm::Layer } else { Norm::Rms };
            let (x, gain_values, moments) = (Values::of(saved.x), Values::of(saved.gain), Values::of(saved.moments));
            let cotangent = Values::of(d_y.clone());
            let gain = RowOperand::new(gain_values.slice(), rows, width);
            let moments = bytemuck::cast_slice(moments.slice());
            let d = cotangent.slice();
            let d_x = wanted[0].then(|| x.like(norm::backward_x(kind, x.slice(), moments, gain, d)));
            let d_gain =
                wanted[1].then(|| gain_values.like(norm::backward_gain(x.slice(), moments, gain.is_shared(), d)));
            let d_shift = saved.layer.filter(|_| wanted[2]).map(|SharedShift(shared)| match shared {
                true => tensor(norm::backward_shift(rows, d), [1, width]),
                false => d_y,
            });
            [d_x, d_gain, d_shift]
        }
    }
}
