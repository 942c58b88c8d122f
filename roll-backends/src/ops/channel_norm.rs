//! The RMS norm of the Wan VAE, over the channels of each position of a video, alone or followed by SiLU.

use burn_tensor::Tensor;

use super::Kernels;
use super::expression::Expression;
use super::operator::{Cotangents, Operator, Primitives, Pullback, call, with_backend};
use crate::backend::{Backend, TensorMetadata, tensor::FloatTensor as Floats};

/// The RMS norm of the Wan VAE: `x / max(|x|, 1e-12) * sqrt(C) * gain`, where `|x|` is the L2 norm over the channels of
/// x `[C, T, H, W]` and gain is `[C]`. The result has the dtype of x, f32 or bf16; norms are computed in f32.
pub fn channel_norm(x: Tensor<4>, gain: Tensor<1>) -> Tensor<4> {
    normalise(x, gain, WITHOUT_SILU)
}

/// [`channel_norm`] followed by SiLU, fused.
pub fn channel_norm_silu(x: Tensor<4>, gain: Tensor<1>) -> Tensor<4> {
    normalise(x, gain, WITH_SILU)
}

/// Concatenates, along time, `past` and [`channel_norm_silu`] of x: the input of a causal convolution. `past` has the
/// channels, height, width and dtype of x.
pub fn channel_norm_silu_after(past: Tensor<4>, x: Tensor<4>, gain: Tensor<1>) -> Tensor<4> {
    assert_eq!([x.dims()[0]], gain.dims(), "the gain of a channel norm of {:?}", x.dims());
    assert_eq!(past.dtype(), x.dtype(), "frames before a channel norm, and its operand");
    let dtype = x.dtype();
    call(ChannelNormAfter, [past.into_dispatch(), x.into_dispatch(), gain.into_dispatch()]).cast(dtype)
}

/// The cotangent of x, given the cotangent `d_y` of [`channel_norm_silu`]`(x, gain)`. For callers that pull back layer
/// by layer, without a graph and without the value, which is not recomputed. The result has the dtype of x and is not
/// differentiable.
pub fn channel_norm_silu_pull(x: Tensor<4>, gain: Tensor<1>, d_y: Tensor<4>) -> Tensor<4> {
    assert_eq!([x.dims()[0]], gain.dims(), "the gain of a channel norm of {:?}", x.dims());
    assert_eq!(x.dims(), d_y.dims(), "the operand of a channel norm and the cotangent of its value");
    let dtype = x.dtype();
    let operands = [x.into_dispatch(), gain.into_dispatch(), d_y.into_dispatch()];
    let d_x: Tensor<4> = with_backend!(operands[0], B => {
        let [x, gain, d_y] = operands.map(B::constant);
        B::tensor(B::channel_norm_silu_pull(x, gain, d_y))
    });
    d_x.cast(dtype)
}

fn normalise(x: Tensor<4>, gain: Tensor<1>, has_silu: bool) -> Tensor<4> {
    assert_eq!([x.dims()[0]], gain.dims(), "the gain of a channel norm of {:?}", x.dims());
    let dtype = x.dtype();
    // The project's own kernels return f32 for any dtype.
    call(ChannelNorm { has_silu }, [x.into_dispatch(), gain.into_dispatch()]).cast(dtype)
}

/// See [`channel_norm`] and [`channel_norm_silu`]; the operands are x and gain.
struct ChannelNorm {
    has_silu: bool,
}

impl Operator<2> for ChannelNorm {
    fn record<B: Kernels>(self, [x, gain]: [Floats<B>; 2], wanted: [bool; 2]) -> (Floats<B>, impl Pullback<B, 2>) {
        let (y, factors) = B::channel_norm_forward(x.clone(), gain.clone(), self.has_silu);
        (y, move |d_y| B::channel_norm_backward([x, gain, factors], self.has_silu, d_y, wanted))
    }
}

/// See [`channel_norm_silu_after`]; the operands are past, x and gain.
struct ChannelNormAfter;

impl Operator<3> for ChannelNormAfter {
    fn forward<B: Kernels>(self, [past, x, gain]: [Floats<B>; 3]) -> Floats<B> {
        B::channel_norm_silu_after(past, x, gain)
    }

    fn record<B: Kernels>(
        self,
        [past, x, gain]: [Floats<B>; 3],
        [past_wanted, wanted @ ..]: [bool; 3],
    ) -> (Floats<B>, impl Pullback<B, 3>) {
        let (y, factors) = B::channel_norm_forward(x.clone(), gain.clone(), WITH_SILU);
        let (past, y) = (Expression::<B>(past), Expression::<B>(y));
        let ([_, past_frames, ..], dtype) = (past.dims::<4>(), past.dtype());
        let joined = Expression::cat(vec![past, y.cast(dtype)], 1).0;
        (joined, move |d_y| {
            let d_y = Expression::<B>(d_y);
            let [_, all_frames, ..] = d_y.dims::<4>();
            let d_past = past_wanted.then(|| d_y.clone().narrow(1, 0..past_frames).0);
            let d_norm = d_y.narrow(1, past_frames..all_frames).0;
            let [d_x, d_gain] = B::channel_norm_backward([x, gain, factors], WITH_SILU, d_norm, wanted);
            [d_past, d_x, d_gain]
        })
    }
}

/// The norm and its gradients on one backend.
pub trait ChannelNormKernel: Backend {
    /// Returns the result, and the factor `sqrt(C) / max(|x|, 1e-12)` of each position as `[1, T * H * W]`.
    fn channel_norm_forward(x: Floats<Self>, gain: Floats<Self>, has_silu: bool) -> (Floats<Self>, Floats<Self>) {
        let (x, gain) = (Expression::<Self>(x), Expression(gain));
        let shape @ [channels, ..]: [usize; 4] = x.dims();
        let x = by_position(x);
        let factors = x.clone().squared().sum(0).sqrt().clamp_min(MIN_NORM).recip() * (channels as f64).sqrt();
        let y = x * factors.clone() * gain.reshape([channels, 1]);
        let y = if has_silu { y.clone() * y.sigmoid() } else { y };
        (y.reshape(shape).0, factors.0)
    }

    /// The gradients of x and gain that are `wanted`. `saved` holds x, gain and the factors that the forward pass
    /// returned.
    fn channel_norm_backward(
        saved: [Floats<Self>; 3],
        has_silu: bool,
        d_y: Floats<Self>,
        wanted: [bool; 2],
    ) -> Cotangents<Self, 2> {
        composed_backward::<Self>(saved, has_silu, d_y, wanted)
    }

    /// Returns only the factors of [`ChannelNormKernel::channel_norm_forward`].
    fn channel_norm_factors(x: Floats<Self>, gain: Floats<Self>) -> Floats<Self> {
        let (_, factors) = Self::channel_norm_forward(x, gain, WITHOUT_SILU);
        factors
    }

    /// See [`channel_norm_silu_after`].
    fn channel_norm_silu_after(past: Floats<Self>, x: Floats<Self>, gain: Floats<Self>) -> Floats<Self> {
        let dtype = x.dtype();
        let (y, _) = Self::channel_norm_forward(x, gain, WITH_SILU);
        Expression::<Self>::cat(vec![Expression(past), Expression::<Self>(y).cast(dtype)], 1).0
    }

    /// See [`channel_norm_silu_pull`].
    fn channel_norm_silu_pull(x: Floats<Self>, gain: Floats<Self>, d_y: Floats<Self>) -> Floats<Self> {
        composed_pull::<Self>(x, gain, d_y)
    }
}

/// The default of [`ChannelNormKernel::channel_norm_silu_pull`], composed of the kernel's other methods.
pub(super) fn composed_pull<B: ChannelNormKernel>(x: Floats<B>, gain: Floats<B>, d_y: Floats<B>) -> Floats<B> {
    let factors = B::channel_norm_factors(x.clone(), gain.clone());
    let only_x = [true, false];
    let [d_x, _] = B::channel_norm_backward([x, gain, factors], WITH_SILU, d_y.clone(), only_x);
    // The gradient of x is always returned, because it is wanted.
    d_x.unwrap_or(d_y)
}

/// The default of [`ChannelNormKernel::channel_norm_backward`], composed of primitive operations.
pub(super) fn composed_backward<B: Backend>(
    [x, gain, factors]: [Floats<B>; 3],
    has_silu: bool,
    d_y: Floats<B>,
    [x_wanted, gain_wanted]: [bool; 2],
) -> Cotangents<B, 2> {
    let (x, gain, factors) = (Expression::<B>(x), Expression(gain), Expression::<B>(factors));
    let shape @ [channels, ..]: [usize; 4] = x.dims();
    let (x, d_y) = (by_position(x), by_position(Expression(d_y)));
    let gain = gain.reshape([channels, 1]);
    let normed = x * factors.clone();
    // The cotangent of `normed * gain`, before SiLU.
    let d_scaled = if has_silu {
        let scaled = normed.clone() * gain.clone();
        let s = scaled.clone().sigmoid();
        d_y * (s.clone() + scaled * s.clone() * (s * -1.0 + 1.0))
    } else {
        d_y
    };
    let d_gain = gain_wanted.then(|| (normed.clone() * d_scaled.clone()).sum(1).reshape([channels]).0);
    let d_x = x_wanted.then(|| {
        let d_normed = d_scaled * gain;
        // Below `MIN_NORM` the divisor does not depend on x, and the gradient has no projection. This needs no case of
        // its own: in practice x is exactly zero there, and so are `normed` and `projection`.
        let projection = (normed.clone() * d_normed.clone()).mean(0);
        ((d_normed - normed * projection) * factors).reshape(shape).0
    });
    [d_x, d_gain]
}

/// Values of the argument `has_silu` of [`ChannelNormKernel`]'s methods.
const WITH_SILU: bool = true;
const WITHOUT_SILU: bool = false;

/// Lower bound of the norm of a position.
pub(super) const MIN_NORM: f64 = 1e-12;

/// Reshapes `[C, T, H, W]` to `[C, positions]`.
fn by_position<B: Backend>(x: Expression<B>) -> Expression<B> {
    let [channels, t, h, w]: [usize; 4] = x.dims();
    x.reshape([channels, t * h * w])
}
