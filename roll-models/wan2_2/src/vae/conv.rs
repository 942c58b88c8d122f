//! The convolutions of the VAE. Kernel and bias are f32 and are rounded to the dtype of the input.

use burn_tensor::{Tensor, module, ops::ConvOptions};
use roll_backends::ops;
use roll_network::precision::as_dtype;

use super::layout::ChunkLayout;

/// Convolves `[C, T, H, W]` with a kernel `[O, C, kt, kh, kw]`. `stride` is `[time, height, width]`. `padding`,
/// `[height, width]`, is the number of zeros on each side; the caller pads in time.
pub fn conv(
    x: Tensor<4>,
    kernel: Tensor<5>,
    bias: Tensor<1>,
    stride: [usize; 3],
    padding: [usize; 2],
    layout: ChunkLayout,
) -> Tensor<4> {
    let [out, _, kt, kh, kw] = kernel.dims();
    // A kernel of size 1 is the same linear map at every position.
    if [kt, kh, kw] == [1, 1, 1] && stride == [1, 1, 1] {
        return layout.pointwise(x, kernel.flatten::<2>(1, 4), bias);
    }
    let (kernel, bias) = (as_dtype(kernel, x.dtype()), as_dtype(bias, x.dtype()));
    if stride == [1, 1, 1] {
        // The project's own operator has no strides.
        return ops::conv3d(x, kernel, Some(bias), [0, padding[0], padding[1]]);
    }
    let [c, t, h, w] = x.dims();
    let (dilation, groups, batch) = ([1, 1, 1], 1, 1);
    let options = ConvOptions::new(stride, [0, padding[0], padding[1]], dilation, groups);
    let y = module::conv3d(x.reshape([batch, c, t, h, w]), kernel, Some(bias), options);
    let [_, _, t, h, w] = y.dims();
    y.reshape([out, t, h, w])
}

/// The pullback of [`conv`] with stride 1: maps the cotangent of the output to the cotangent of the input, by a
/// convolution with the flipped kernel. It needs neither the input nor the output.
pub fn conv_pull(cotangent: Tensor<4>, kernel: Tensor<5>, padding: [usize; 2]) -> Tensor<4> {
    let kernel = as_dtype(kernel, cotangent.dtype());
    ops::conv3d_pull(cotangent, kernel, [0, padding[0], padding[1]])
}
