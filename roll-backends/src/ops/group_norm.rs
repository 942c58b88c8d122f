//! Group norm followed by SiLU, for networks that pull back layer by layer.

use burn_tensor::{DType, Tensor};

use super::expression::Expression;
use super::operator::{Primitives, with_backend};
use crate::backend::{Backend, tensor::FloatTensor as Floats};

/// The sizes of a group norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Groups {
    /// Number of groups of channels; divides the number of channels.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
}

/// SiLU of the group norm of x `[C, T, H, W]`: each group of channels is normalised over its channels and positions, and
/// channels are scaled by `gain` and shifted by `bias`, f32 `[C]`. Computed in f32; the result has the dtype of x and is
/// not differentiable (see [`group_norm_silu_pull`]).
pub fn group_norm_silu(x: Tensor<4>, gain: Tensor<1>, bias: Tensor<1>, groups: Groups) -> Tensor<4> {
    assert_groups(&x, &gain, &bias, groups);
    let dtype = x.dtype();
    let operands = [x.into_dispatch(), gain.into_dispatch(), bias.into_dispatch()];
    let y: Tensor<4> = with_backend!(operands[0], B => {
        B::tensor(B::group_norm_silu(operands.map(B::constant), groups))
    });
    y.cast(dtype)
}

/// The cotangent of x, given the cotangent `d_y` of [`group_norm_silu`]`(x, gain, bias, groups)`. The result has the
/// dtype of `d_y` and is not differentiable.
pub fn group_norm_silu_pull(
    x: Tensor<4>,
    gain: Tensor<1>,
    bias: Tensor<1>,
    groups: Groups,
    d_y: Tensor<4>,
) -> Tensor<4> {
    assert_groups(&x, &gain, &bias, groups);
    assert_eq!(x.dims(), d_y.dims(), "the operand of a group norm and the cotangent of its value");
    let dtype = d_y.dtype();
    let operands = [x.into_dispatch(), gain.into_dispatch(), bias.into_dispatch(), d_y.into_dispatch()];
    let d_x: Tensor<4> = with_backend!(operands[0], B => {
        let [x, gain, bias, d_y] = operands.map(B::constant);
        B::tensor(B::group_norm_silu_pull([x, gain, bias], groups, d_y))
    });
    d_x.cast(dtype)
}

/// Panics unless gain and bias have a number per channel and the groups divide the channels.
fn assert_groups(x: &Tensor<4>, gain: &Tensor<1>, bias: &Tensor<1>, Groups { groups, .. }: Groups) {
    let [channels, ..] = x.dims();
    assert_eq!([[channels]; 2], [gain.dims(), bias.dims()], "gain and bias of a group norm of {:?}", x.dims());
    assert!(groups > 0 && channels.is_multiple_of(groups), "{groups} groups of {channels} channels");
}

/// The norm and its pullback on one backend. Operands are x, gain and bias; results are f32.
pub trait GroupNormKernel: Backend {
    /// See [`group_norm_silu`].
    fn group_norm_silu([x, gain, bias]: [Floats<Self>; 3], groups: Groups) -> Floats<Self> {
        let shape: [usize; 4] = Expression::<Self>(x.clone()).dims();
        let (hat, _) = normalise::<Self>(x, groups);
        let z = affine::<Self>(hat, shape, gain, bias);
        (z.clone() * z.sigmoid()).reshape(shape).0
    }

    /// See [`group_norm_silu_pull`].
    fn group_norm_silu_pull([x, gain, bias]: [Floats<Self>; 3], groups: Groups, d_y: Floats<Self>) -> Floats<Self> {
        let shape @ [c, t, h, w]: [usize; 4] = Expression::<Self>(x.clone()).dims();
        let (hat, inverse) = normalise::<Self>(x, groups);
        let z = affine::<Self>(hat.clone(), shape, gain.clone(), bias);
        let s = z.clone().sigmoid();
        let d_y = Expression::<Self>(d_y).cast(DType::F32).reshape([c, t * h, w]);
        // d silu(z) / dz = s + z s (1 - s)
        let d_z = d_y * (s.clone() + z * s.clone() * (s * -1.0 + 1.0));
        let d_hat = (d_z * Expression(gain).reshape([c, 1, 1])).reshape(by_group(shape, groups));
        let projection = mean(d_hat.clone() * hat.clone());
        let centred = d_hat.clone() - mean(d_hat);
        ((centred - hat * projection) * inverse).reshape(shape).0
    }
}

/// The shape `[groups, rows of a group, W]` of x `[C, T, H, W]`.
fn by_group([c, t, h, w]: [usize; 4], Groups { groups, .. }: Groups) -> [usize; 3] {
    [groups, c / groups * t * h, w]
}

/// The mean of each group, `[groups, 1, 1]`: of the means of rows, because one f32 sum over millions of pixels would be
/// inexact.
fn mean<B: Backend>(x: Expression<B>) -> Expression<B> {
    x.mean(2).mean(1)
}

/// Returns x with mean 0 and variance 1 in each group, in the shape of [`by_group`], and the inverse of the deviations.
fn normalise<B: Backend>(x: Floats<B>, groups: Groups) -> (Expression<B>, Expression<B>) {
    let x = Expression::<B>(x).cast(DType::F32);
    let shape = by_group(x.dims(), groups);
    let x = x.reshape(shape);
    let centred = x.clone() - mean(x);
    let inverse = (mean(centred.clone().squared()) + groups.eps).sqrt().recip();
    (centred * inverse.clone(), inverse)
}

/// Applies gain and bias; returns `[C, T * H, W]`.
fn affine<B: Backend>(hat: Expression<B>, [c, t, h, w]: [usize; 4], gain: Floats<B>, bias: Floats<B>) -> Expression<B> {
    let [gain, bias] = [gain, bias].map(|x| Expression::<B>(x).reshape([c, 1, 1]));
    hat.reshape([c, t * h, w]) * gain + bias
}
