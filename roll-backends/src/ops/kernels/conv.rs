//! Convolution with stride 1 over `[C, T, H, W]`, without unfolding.
//!
//! In the padded input each tap of the kernel sees the output's rows, shifted: the result is the sum over the taps of
//! `weight[tap] * shifted input` ([`correlate`]). The weight's gradient is a product of matrices for each tap.

use rayon::prelude::*;

use super::correlate::{Packed, WIDE, correlate};
use super::matrix::{Threads, View, ViewMut};

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Channels of the input.
    pub inputs: usize,
    /// Channels of the output.
    pub outputs: usize,
    /// Frames, rows and columns of the input.
    pub size: [usize; 3],
    /// The kernel's.
    pub kernel: [usize; 3],
    /// Zeros on both sides of each axis; less than the kernel.
    pub padding: [usize; 3],
}

impl Shape {
    /// Frames, rows and columns of the output; `None` if the kernel does not fit.
    pub fn output(&self) -> Option<[usize; 3]> {
        let mut out = [0; 3];
        for (i, out) in out.iter_mut().enumerate() {
            let padded = self.size[i] + 2 * self.padding[i];
            *out = (padded + 1).checked_sub(self.kernel[i]).filter(|&n| n > 0 && self.kernel[i] > 0)?;
        }
        Some(out)
    }

    /// The convolution of the output's cotangent that gives the input's.
    fn transposed(&self, output: [usize; 3]) -> Self {
        let padding = std::array::from_fn(|i| self.kernel[i] - 1 - self.padding[i]);
        Self { inputs: self.outputs, outputs: self.inputs, size: output, kernel: self.kernel, padding }
    }
}

/// `x` `[inputs, size]` convolved with `weight` `[outputs, inputs, kernel]`, plus a bias for each output channel.
pub fn forward(shape: Shape, x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f32> {
    correlate(shape, &padded_input(shape, x), &Packed::new(shape, weight, false), Some(bias))
}

/// The wanted ones of the gradients of x, weight and bias.
pub fn backward(shape: Shape, x: &[f32], weight: &[f32], d_y: &[f32], wanted: [bool; 3]) -> [Option<Vec<f32>>; 3] {
    let Some(output) = shape.output() else { return [None, None, None] };
    let d_x = wanted[0].then(|| {
        let transposed = shape.transposed(output);
        correlate(transposed, &padded_input(transposed, d_y), &Packed::new(shape, weight, true), None)
    });
    let d_weight = wanted[1].then(|| weight_gradient(shape, output, x, d_y));
    let d_bias = wanted[2].then(|| {
        let per_channel = output.iter().product::<usize>();
        d_y.chunks_exact(per_channel).map(|d| d.iter().map(|&v| f64::from(v)).sum::<f64>() as f32).collect()
    });
    [d_x, d_weight, d_bias]
}

/// A copy with zeros around each channel.
pub struct Padded {
    /// `[channels, size]`, and a few zeros behind it that a tile may reach into.
    pub values: Vec<f32>,
    channels: usize,
    /// Frames, rows and columns.
    pub size: [usize; 3],
}

impl Padded {
    /// `before` zeros in front of each axis, `size` in all.
    fn new(x: &[f32], channels: usize, inner: [usize; 3], before: [usize; 3], size: [usize; 3]) -> Self {
        let [frames, rows, columns] = size;
        let mut values = vec![0.0; channels * frames * rows * columns + WIDE];
        values[..channels * frames * rows * columns]
            .par_chunks_mut((frames * rows * columns).max(1))
            .enumerate()
            .for_each(|(c, channel)| {
                for t in 0..inner[0] {
                    for r in 0..inner[1] {
                        let from = ((c * inner[0] + t) * inner[1] + r) * inner[2];
                        let to = ((t + before[0]) * rows + r + before[1]) * columns + before[2];
                        channel[to..to + inner[2]].copy_from_slice(&x[from..from + inner[2]]);
                    }
                }
            });
        Self { values, channels, size }
    }

    /// The matrix `[channels, length]` of neighbours from a position on.
    fn from(&self, [t, r, c]: [usize; 3], length: usize) -> View<'_> {
        let [frames, rows, columns] = self.size;
        let start = (t * rows + r) * columns + c;
        View::new(&self.values[..self.channels * frames * rows * columns], self.channels, frames * rows * columns)
            .columns(start..start + length)
    }
}

fn padded_input(shape: Shape, x: &[f32]) -> Padded {
    let size = std::array::from_fn(|i| shape.size[i] + 2 * shape.padding[i]);
    Padded::new(x, shape.inputs, shape.size, shape.padding, size)
}

/// Frame, row and column of each tap.
pub fn tap_offsets(kernel: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    let [frames, rows, columns] = kernel;
    (0..frames * rows * columns).map(move |tap| [tap / (rows * columns), tap / columns % rows, tap % columns])
}

fn weight_gradient(shape: Shape, output: [usize; 3], x: &[f32], d_y: &[f32]) -> Vec<f32> {
    let (taps, pairs) = (shape.kernel.iter().product::<usize>(), shape.inputs * shape.outputs);
    let x = padded_input(shape, x);
    // Rows as wide as the padded input's: the zeros between them meet what the tap sees beyond the output's columns.
    let d_y = Padded::new(d_y, shape.outputs, output, [0; 3], [output[0], output[1], x.size[2]]);
    let length = (output[1] - 1) * x.size[2] + output[2];
    let mut by_tap = vec![0.0; taps * pairs];
    let threads = if taps > 1 { Threads::One } else { Threads::All };
    if pairs > 0 {
        let offsets: Vec<_> = tap_offsets(shape.kernel).collect();
        by_tap.par_chunks_mut(pairs).zip(offsets).for_each(|(sum, [kt, kr, kc])| {
            let mut sum = ViewMut::new(sum, shape.outputs, shape.inputs);
            for t in 0..output[0] {
                let seen = x.from([t + kt, kr, kc], length);
                sum.product(d_y.from([t, 0, 0], length), seen.t(), 1.0, true, threads);
            }
        });
    }
    let mut d_weight = vec![0.0; taps * pairs];
    for (pair, out) in d_weight.chunks_exact_mut(taps).enumerate() {
        out.iter_mut().enumerate().for_each(|(tap, out)| *out = by_tap[tap * pairs + pair]);
    }
    d_weight
}
