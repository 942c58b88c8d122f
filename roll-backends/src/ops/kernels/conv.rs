//! 3-d convolution with stride 1 over `[C, T, H, W]` on the CPU, without im2col.
//!
//! Each kernel tap reads the rows of the padded input, shifted. The result is the sum over the taps of
//! `weight[tap] * shifted input` ([`correlate`]); the weight's gradient is one matrix product per tap.

use rayon::prelude::*;

use super::correlate::{CorrelationWeight, correlate};
pub use super::geometry::{ConvKind, ConvShape};
use super::geometry::{Padded, tap_offsets};
use super::matrix::{Threads, UNSCALED, Update, ViewMut};
use super::parallel::in_pool;

/// Convolves `x` `[inputs, size]` with `weight` `[outputs, inputs, kernel]` and adds the bias of each output channel.
pub fn forward(shape: ConvShape, x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f32> {
    in_pool(multiply_adds(shape), || {
        let packed = CorrelationWeight::new(shape, weight, ConvKind::Forward);
        correlate(shape, &Padded::input(shape, x), &packed, Some(bias))
    })
}

/// Returns the gradients of x, weight and bias that are `wanted`.
pub fn backward(
    shape: ConvShape,
    x: &[f32],
    weight: &[f32],
    d_y: &[f32],
    [x_wanted, weight_wanted, bias_wanted]: [bool; 3],
) -> [Option<Vec<f32>>; 3] {
    in_pool(multiply_adds(shape), || {
        let Some(output) = shape.output() else { return [None, None, None] };
        let d_x = x_wanted.then(|| {
            let transposed = shape.transposed(output);
            let packed = CorrelationWeight::new(shape, weight, ConvKind::Transposed);
            let no_bias = None;
            correlate(transposed, &Padded::input(transposed, d_y), &packed, no_bias)
        });
        let d_weight = weight_wanted.then(|| weight_gradient(shape, output, x, d_y));
        let d_bias = bias_wanted.then(|| {
            let per_channel = output.iter().product::<usize>();
            d_y.chunks_exact(per_channel).map(|d| d.iter().map(|&v| f64::from(v)).sum::<f64>() as f32).collect()
        });
        [d_x, d_weight, d_bias]
    })
}

/// Number of multiply-adds of the convolution, or of one of its gradients.
fn multiply_adds(shape: ConvShape) -> usize {
    let taps: usize = shape.kernel.iter().product();
    shape.output().map_or(0, |size| size.iter().product::<usize>() * taps * shape.inputs * shape.outputs)
}

/// The gradient of the weight, `[outputs, inputs, taps]`. It is computed tap by tap.
fn weight_gradient(shape: ConvShape, output: [usize; 3], x: &[f32], d_y: &[f32]) -> Vec<f32> {
    let (taps, pairs) = (shape.kernel.iter().product::<usize>(), shape.inputs * shape.outputs);
    let x = Padded::input(shape, x);
    // `d_y` gets zeros on the right, so that its rows are as wide as the rows of the padded input. A frame is then one
    // contiguous span in both, and one product covers it. Input columns without an output are multiplied by zeros.
    let d_y = Padded::new(d_y, shape.outputs, output, [0; 3], [output[0], output[1], x.size[2]]);
    // Positions of a frame from its first to its last output.
    let span = (output[1] - 1) * x.size[2] + output[2];
    let mut by_tap = vec![0.0; taps * pairs];
    // Several taps are computed in parallel, so that each product uses one thread.
    let threads = if taps > 1 { Threads::One } else { Threads::All };
    if pairs > 0 {
        let offsets: Vec<_> = tap_offsets(shape.kernel).collect();
        by_tap.par_chunks_mut(pairs).zip(offsets).for_each(|(sum, [kt, kr, kc])| {
            let mut sum = ViewMut::new(sum, shape.outputs, shape.inputs);
            for t in 0..output[0] {
                let inputs = x.span_from([t + kt, kr, kc], span);
                sum.product(d_y.span_from([t, 0, 0], span), inputs.t(), UNSCALED, Update::Add, threads);
            }
        });
    }
    // From `[taps, outputs, inputs]` to `[outputs, inputs, taps]`.
    let mut d_weight = vec![0.0; taps * pairs];
    for (pair, out) in d_weight.chunks_exact_mut(taps).enumerate() {
        out.iter_mut().enumerate().for_each(|(tap, value)| *value = by_tap[tap * pairs + pair]);
    }
    d_weight
}
