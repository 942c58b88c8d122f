//! The input gradient for non-overlapping windows, e.g. of patch embeddings. Each input position belongs to one window
//! and one tap, so that its gradient is one sum over output channels. A matrix product computes these sums, with one
//! row per pair of input channel and tap, and a second pass moves each number to its position.

use rayon::prelude::*;

use super::passes::Conv2dShape;
use super::shared_output::filled;
use super::tiles::{self, PackedWeight};
use super::{Call, Finish};

/// Whether the windows of `shape` tile the input without overlap.
pub fn applies(shape: Conv2dShape) -> bool {
    shape.kernel == shape.stride && shape.dilation == [1; 2] && shape.groups == 1 && shape.taps() > 1
}

/// The matrix product as a 1 x 1 convolution. It reads the cotangents of the sums; its output channels are the pairs of
/// input channel and tap.
fn as_convolution(shape: Conv2dShape) -> Conv2dShape {
    Conv2dShape {
        inputs: shape.outputs,
        outputs: shape.inputs * shape.taps(),
        size: shape.output,
        kernel: [1; 2],
        stride: [1; 2],
        before: [0; 2],
        ..shape
    }
}

/// Packs the weight `[outputs, inputs, taps]` for [`pull_convolution`].
pub fn pack(shape: Conv2dShape, weight: &[f32]) -> PackedWeight {
    let pairs = shape.inputs * shape.taps();
    PackedWeight::new([1, pairs, shape.outputs, 1], |_, pair, output, _| weight[output * pairs + pair])
}

/// Returns the gradient of x, given the gradient of the sums.
pub fn pull_convolution(shape: Conv2dShape, packed: &PackedWeight, d_sums: &[f32]) -> Vec<f32> {
    let product = as_convolution(shape);
    let plane = shape.output[0] * shape.output[1];
    // SAFETY: the forward pass covers every output position, and every channel belongs to a task.
    let by_tap = unsafe {
        filled(shape.items * product.outputs * plane, |y| {
            tiles::run_pass(&Call::new(product, d_sums, y, Finish::default()), &product.forward(), packed);
        })
    };
    let [rows, columns] = shape.size;
    let mut d_x = vec![0.0; shape.items * shape.inputs * rows * columns];
    // Window and tap of a position along an axis; `None` outside of all windows.
    let window_and_tap = |i: usize, axis: usize| {
        let padded = i + shape.before[axis];
        let (window, tap) = (padded / shape.stride[axis], padded % shape.stride[axis]);
        (window < shape.output[axis]).then_some((window, tap))
    };
    d_x.par_chunks_mut((rows * columns).max(1)).enumerate().for_each(|(channel, d_x)| {
        let of_channel = &by_tap[channel * shape.taps() * plane..][..shape.taps() * plane];
        for (row, d_x) in d_x.chunks_exact_mut(columns).enumerate() {
            let Some((window_row, tap_row)) = window_and_tap(row, 0) else { continue };
            for (column, d_x) in d_x.iter_mut().enumerate() {
                let Some((window_column, tap_column)) = window_and_tap(column, 1) else { continue };
                let tap = tap_row * shape.kernel[1] + tap_column;
                *d_x = of_channel[tap * plane + window_row * shape.output[1] + window_column];
            }
        }
    });
    d_x
}
