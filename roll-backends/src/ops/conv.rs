//! 3-d convolution over time and space.

use burn_tensor::ops::ConvOptions;
use burn_tensor::{Tensor, module};

use super::Kernels;
use super::expression::Expression;
use super::operator::{Cotangents, Operator, Primitives, Pullback, call, with_backend};
use crate::backend::{Backend, tensor::FloatTensor as Floats};
use crate::device::{is_flex, is_gpu, prefers_channels_innermost};

/// 3-d convolution of one volume with stride 1. Shapes: x `[C_in, T, H, W]`, weight `[C_out, C_in, kt, kh, kw]`, bias
/// `[C_out]`, result `[C_out, T', H', W']`. `padding` zeros are added on both sides of each axis; the padding of an
/// axis must be less than its kernel size. A causal convolution passes the earlier frames in x and pads time by 0; a
/// purely spatial one has `kt = 1`. Operands and result have one dtype; accumulation is f32. Panics if the shapes do
/// not match.
pub fn conv3d(x: Tensor<4>, weight: Tensor<5>, bias: Option<Tensor<1>>, padding: [usize; 3]) -> Tensor<4> {
    let ([channels, t, h, w], [outputs, inputs, kernel @ ..]) = (x.dims(), weight.dims());
    // Size n, kernel size k and padding p of each axis.
    let kernel_fits = [t, h, w].iter().zip(kernel).zip(padding).all(|((&n, k), p)| k > p && n + 2 * p >= k);
    assert!(
        channels == inputs && kernel_fits,
        "convolution of {:?} with {:?}, padded by {padding:?}",
        x.dims(),
        weight.dims()
    );
    let device = x.device();
    let (is_channels_innermost, is_on_gpu) = (prefers_channels_innermost(&device), is_gpu(&device));
    let bias = bias.unwrap_or_else(|| {
        // Devices with channels innermost add the bias in a separate pass, and skip that pass if the bias is empty.
        Tensor::zeros([if is_channels_innermost { 0 } else { outputs }], (&device.without_autodiff(), x.dtype()))
    });
    let bias_fits = bias.dims() == [outputs] || (is_channels_innermost && bias.dims() == [0]);
    assert!(bias_fits, "a bias of {:?} beside a convolution with {:?}", bias.dims(), weight.dims());
    if t * h * w < FEW_POSITIONS && !is_on_gpu && !uses_winograd(&x, &weight) {
        return module::conv3d(x.unsqueeze(), weight, Some(bias), options(padding)).squeeze_dim(0);
    }
    let dtype = x.dtype();
    // The project's own kernels return f32 for any dtype.
    fused_conv3d(x, weight, bias, padding).cast(dtype)
}

/// Number of positions below which a convolution on the CPU uses Burn's kernel, unless Winograd's algorithm computes
/// it. The weight is then larger than the input, and packing it for each tap costs more than im2col. At 384 channels of
/// 3 x 16 x 16, Burn's takes half the time of ours; at 96 and 192 channels of 4 x 64 x 64, ours takes three quarters of
/// Burn's. GPUs never use it: Burn's kernel of `cuda` accumulates bf16 in bf16.
const FEW_POSITIONS: usize = 2048;

/// The cotangent of x, given the cotangent of [`conv3d`]'s result, `[C_out, T', H', W']`. It is a convolution with the
/// kernel flipped along all axes, and needs neither x nor the result. No gradient flows through it.
pub fn conv3d_pull(cotangent: Tensor<4>, weight: Tensor<5>, padding: [usize; 3]) -> Tensor<4> {
    if !uses_winograd(&cotangent, &weight) {
        let [_, _, kernel @ ..] = weight.dims();
        let flipped = weight.flip([2, 3, 4]).swap_dims(0, 1);
        let no_bias = None;
        return conv3d(cotangent, flipped, no_bias, transposed_padding(kernel, padding));
    }
    let ([channels, t, h, w], [outputs, _, kernel @ ..], dtype) = (cotangent.dims(), weight.dims(), cotangent.dtype());
    // Size n of the cotangent, kernel size k and padding p of each axis; x has n + k - 1 - 2p positions.
    let kernel_fits = [t, h, w].iter().zip(kernel).zip(padding).all(|((&n, k), p)| k > p && n + k > 2 * p + 1);
    assert!(
        channels == outputs && kernel_fits,
        "the pull of {:?} through a convolution with {:?}, padded by {padding:?}",
        cotangent.dims(),
        weight.dims()
    );
    let operands = [cotangent.into_dispatch(), weight.into_dispatch()];
    let d_x: Tensor<4> = with_backend!(operands[0], B => {
        let [cotangent, weight] = operands.map(B::constant);
        B::tensor(B::conv_pull(cotangent, weight, padding))
    });
    d_x.cast(dtype)
}

/// Whether flex computes the convolution by Winograd's algorithm. For 3 x 3 kernels it is faster at any size, except
/// with few channels, where the transforms cost more than they save.
fn uses_winograd(x: &Tensor<4>, weight: &Tensor<5>) -> bool {
    is_winograd_shape(weight.dims()) && is_flex(&x.device())
}

/// Least number of input and of output channels for which Winograd's algorithm is faster.
const MIN_WINOGRAD_CHANNELS: usize = 32;

/// The part of [`uses_winograd`] that depends on the weight's shape, `[C_out, C_in, kt, kh, kw]`.
pub(super) fn is_winograd_shape([outputs, inputs, _, rows, columns]: [usize; 5]) -> bool {
    [rows, columns] == [3, 3] && inputs.min(outputs) >= MIN_WINOGRAD_CHANNELS
}

/// The padding of the convolution that computes the input's cotangent for a convolution with `padding`.
fn transposed_padding(kernel: [usize; 3], padding: [usize; 3]) -> [usize; 3] {
    std::array::from_fn(|i| kernel[i] - 1 - padding[i])
}

/// [`conv3d`] by the backend's [`ConvKernel`], whatever the size.
pub(super) fn fused_conv3d(x: Tensor<4>, weight: Tensor<5>, bias: Tensor<1>, padding: [usize; 3]) -> Tensor<4> {
    call(Conv { padding }, [x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch()])
}

/// See [`conv3d`]; the operands are x, weight and bias.
struct Conv {
    padding: [usize; 3],
}

impl Operator<3> for Conv {
    fn record<B: Kernels>(
        self,
        [x, weight, bias]: [Floats<B>; 3],
        wanted: [bool; 3],
    ) -> (Floats<B>, impl Pullback<B, 3>) {
        let y = B::conv_forward([x.clone(), weight.clone(), bias], self.padding);
        (y, move |d_y| B::conv_backward([x, weight], self.padding, d_y, wanted))
    }
}

/// The convolution and its gradients on one backend.
pub trait ConvKernel: Backend {
    /// Returns the convolution of x. An empty bias means no bias; it occurs on [`prefers_channels_innermost`] devices
    /// only.
    fn conv_forward([x, weight, bias]: [Floats<Self>; 3], padding: [usize; 3]) -> Floats<Self> {
        without_batch::<Self>(Self::conv3d(with_batch::<Self>(x), weight, Some(bias), options(padding)))
    }

    /// The gradients of x, weight and bias that are `wanted`.
    fn conv_backward(
        [x, weight]: [Floats<Self>; 2],
        padding: [usize; 3],
        d_y: Floats<Self>,
        [x_wanted, weight_wanted, bias_wanted]: [bool; 3],
    ) -> Cotangents<Self, 3> {
        let (x, d_y) = (with_batch::<Self>(x), with_batch::<Self>(d_y));
        let d_x = x_wanted.then(|| {
            without_batch::<Self>(Self::conv3d_x_backward(x.clone(), weight.clone(), d_y.clone(), options(padding)))
        });
        let d_weight = weight_wanted.then(|| Self::conv3d_weight_backward(x, weight, d_y.clone(), options(padding)));
        let d_bias = bias_wanted.then(|| {
            let d_y = Expression::<Self>(d_y);
            let [_, outputs, t, h, w] = d_y.dims();
            d_y.reshape([outputs, t * h * w]).sum(1).reshape([outputs]).0
        });
        [d_x, d_weight, d_bias]
    }

    /// The gradient of x, computed without x; see [`conv3d_pull`].
    fn conv_pull(cotangent: Floats<Self>, weight: Floats<Self>, padding: [usize; 3]) -> Floats<Self> {
        let weight = Expression::<Self>(weight);
        let [_, inputs, kernel @ ..] = weight.dims::<5>();
        let bias = weight.zeros([inputs]).cast(weight.dtype());
        let flipped = Expression::<Self>(Self::float_flip(weight.0, &[2, 3, 4])).swap(0, 1);
        Self::conv_forward([cotangent, flipped.0, bias.0], transposed_padding(kernel, padding))
    }
}

/// Burn's options: stride 1, no dilation, one group.
pub(super) fn options(padding: [usize; 3]) -> ConvOptions<3> {
    ConvOptions::new([1; 3], padding, [1; 3], 1)
}

/// Reshapes `[C, T, H, W]` to `[1, C, T, H, W]`, as Burn's convolutions take it.
pub(super) fn with_batch<B: Backend>(x: Floats<B>) -> Floats<B> {
    let x = Expression::<B>(x);
    let [c, t, h, w] = x.dims();
    x.reshape([1, c, t, h, w]).0
}

/// Undoes [`with_batch`].
pub(super) fn without_batch<B: Backend>(x: Floats<B>) -> Floats<B> {
    let x = Expression::<B>(x);
    let [_, c, t, h, w] = x.dims();
    x.reshape([c, t, h, w]).0
}
