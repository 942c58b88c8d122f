//! RMS norm, alone or followed by rotary position embedding as for queries and keys; fused where a backend has a kernel
//! for it.

use burn_tensor::{DType, Tensor};

use super::Kernels;
use super::expression::Expression;
use super::norm::{NormKernel, SavedNorm, assert_row_operand};
use super::operator::{Cotangents, Operator, Pullback, call};
use super::rope::{Direction, RopeKernel, assert_angles};
use crate::backend::{TensorMetadata, tensor::FloatTensor as Floats};

/// RMS norm over the last axis of `[L, D]`: `x / sqrt(mean(x^2) + eps) * gain`; gain is `[D]`. All tensors are f32.
pub fn rms_norm(x: Tensor<2>, gain: Tensor<1>, eps: f64) -> Tensor<2> {
    let (no_angles, one_head) = (None, 1);
    rms_rope(x, gain, no_angles, one_head, eps)
}

/// Applies [`rms_norm`] to whole rows of x `[L, heads * d]` with `gain` `[heads * d]` and then, if `angles`
/// (cosine and sine, `[L, d / 2]`) are given, [`super::rope`] to each head. x and the result have one dtype, f32 or
/// bf16; everything else is f32, and nothing is rounded between the two operators.
pub fn rms_rope(x: Tensor<2>, gain: Tensor<1>, angles: Option<[Tensor<2>; 2]>, heads: usize, eps: f64) -> Tensor<2> {
    let gain: Tensor<2> = gain.unsqueeze();
    assert_row_operand("the gain of an RMS norm", &gain, &x);
    if let Some([cos, sin]) = &angles {
        assert_angles(&x, cos, sin, heads);
    }
    let rotation = angles.map(|angles| Rotation { angles, heads });
    call(RmsRope { rotation, eps }, [x, gain].map(Tensor::into_dispatch))
}

/// See [`rms_rope`]; the operands are x and gain, `[1, D]`.
struct RmsRope {
    rotation: Option<Rotation<Tensor<2>>>,
    eps: f64,
}

impl Operator<2> for RmsRope {
    fn record<B: Kernels>(self, [x, gain]: [Floats<B>; 2], wanted: [bool; 2]) -> (Floats<B>, impl Pullback<B, 2>) {
        let eps = self.eps;
        let rotation = self.rotation.map(|Rotation { angles, heads }| Rotation {
            angles: angles.map(|angle| B::constant(angle.into_dispatch())),
            heads,
        });
        let (y, moments) = B::rms_rope_forward(x.clone(), gain.clone(), rotation.clone(), eps);
        let saved = SavedRmsRope { x, gain, moments, rotation, eps };
        (y, move |d_y| B::rms_rope_backward(saved, d_y, wanted))
    }
}

/// The rotation of a call.
#[derive(Clone, Debug)]
pub struct Rotation<T> {
    /// Cosine and sine of the angles, `[L, d / 2]`.
    pub angles: [T; 2],
    /// Number of heads, which lie side by side in each row.
    pub heads: usize,
}

/// The values of the forward pass that the backward pass needs.
#[derive(Clone, Debug)]
pub struct SavedRmsRope<T> {
    pub x: T,
    /// The gain, `[1, D]`.
    pub gain: T,
    /// The statistics of each row, in a layout that the backend chooses.
    pub moments: T,
    pub rotation: Option<Rotation<T>>,
    pub eps: f64,
}

/// The fused operator on one backend; by default composed of the backend's norm and rotation.
pub trait RmsRopeKernel: NormKernel + RopeKernel {
    /// Returns the result in the dtype of x, and the moments of each row for the backward pass.
    fn rms_rope_forward(
        x: Floats<Self>,
        gain: Floats<Self>,
        rotation: Option<Rotation<Floats<Self>>>,
        eps: f64,
    ) -> (Floats<Self>, Floats<Self>) {
        composed_forward::<Self>(x, gain, rotation, eps)
    }

    /// Returns the gradients of x (in its dtype) and gain that are `wanted`. `d_y` has the dtype of x.
    fn rms_rope_backward(
        saved: SavedRmsRope<Floats<Self>>,
        d_y: Floats<Self>,
        wanted: [bool; 2],
    ) -> Cotangents<Self, 2> {
        composed_backward::<Self>(saved, d_y, wanted)
    }
}

/// [`RmsRopeKernel::rms_rope_forward`] composed of norm and rotation.
pub(super) fn composed_forward<B: RmsRopeKernel>(
    x: Floats<B>,
    gain: Floats<B>,
    rotation: Option<Rotation<Floats<B>>>,
    eps: f64,
) -> (Floats<B>, Floats<B>) {
    let dtype = x.dtype();
    let no_shift = None;
    let (y, moments) = B::norm_forward(Expression::<B>(x).cast(DType::F32).0, gain, no_shift, eps);
    let y = match rotation {
        Some(Rotation { angles, heads }) => B::rotate(y, angles, heads, Direction::Forward),
        None => y,
    };
    (Expression::<B>(y).cast(dtype).0, moments)
}

/// [`RmsRopeKernel::rms_rope_backward`] composed of norm and rotation. `saved.moments` must have the layout that
/// [`composed_forward`] returns.
pub(super) fn composed_backward<B: RmsRopeKernel>(
    saved: SavedRmsRope<Floats<B>>,
    d_y: Floats<B>,
    [x_wanted, gain_wanted]: [bool; 2],
) -> Cotangents<B, 2> {
    let SavedRmsRope { x, gain, moments, rotation, eps } = saved;
    let dtype = x.dtype();
    let d_y = Expression::<B>(d_y).cast(DType::F32).0;
    let d_y = match rotation {
        Some(Rotation { angles, heads }) => B::rotate(d_y, angles, heads, Direction::Back),
        None => d_y,
    };
    let saved = SavedNorm { x: Expression::<B>(x).cast(DType::F32).0, gain, moments, shift: None, eps };
    let [d_x, d_gain, _] = B::norm_backward(saved, d_y, [x_wanted, gain_wanted, false]);
    [d_x.map(|d_x| Expression::<B>(d_x).cast(dtype).0), d_gain]
}
