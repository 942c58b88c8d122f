//! Convolution with stride 1 over `[C, T, H, W]`, without unfolding.
//!
//! In the padded input each tap of the kernel sees the output's rows as one strided matrix, shifted: the result is the
//! sum over the taps of `weight[tap] * shifted input`, and a task adds them up for a few rows of the output while both
//! are in the cache. Rows are as wide as the padded input's there; the columns beyond the output's are dropped.

use rayon::prelude::*;

use super::matrix::{Threads, View, ViewMut};

/// A task's part of the input and of the result are kept to about this many numbers each (256 KiB).
const PART: usize = 1 << 16;

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

    fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// The convolution of the output's cotangent that gives the input's.
    fn transposed(&self, output: [usize; 3]) -> Self {
        let padding = std::array::from_fn(|i| self.kernel[i] - 1 - self.padding[i]);
        Self { inputs: self.outputs, outputs: self.inputs, size: output, kernel: self.kernel, padding }
    }
}

/// `x` `[inputs, size]` convolved with `weight` `[outputs, inputs, kernel]`, plus a bias for each output channel.
pub fn forward(shape: Shape, x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f32> {
    correlate(shape, x, &by_tap(shape, weight, false), Some(bias))
}

/// The wanted ones of the gradients of x, weight and bias.
pub fn backward(shape: Shape, x: &[f32], weight: &[f32], d_y: &[f32], wanted: [bool; 3]) -> [Option<Vec<f32>>; 3] {
    let Some(output) = shape.output() else { return [None, None, None] };
    let d_x = wanted[0].then(|| correlate(shape.transposed(output), d_y, &by_tap(shape, weight, true), None));
    let d_weight = wanted[1].then(|| weight_gradient(shape, output, x, d_y));
    let d_bias = wanted[2].then(|| {
        let per_channel = output.iter().product::<usize>();
        d_y.chunks_exact(per_channel).map(|d| d.iter().map(|&v| f64::from(v)).sum::<f64>() as f32).collect()
    });
    [d_x, d_weight, d_bias]
}

/// The weight as one matrix per tap: `[outputs, inputs]`, or for the backward `[inputs, outputs]` with the taps in
/// reverse.
fn by_tap(shape: Shape, weight: &[f32], transposed: bool) -> Vec<f32> {
    let (taps, pairs) = (shape.taps(), shape.inputs * shape.outputs);
    let mut out = vec![0.0; weight.len()];
    let width = if transposed { shape.outputs } else { shape.inputs };
    if width == 0 {
        return out;
    }
    // A task fills one row of every tap's matrix, so that it reads the taps of a pair while they are in the cache.
    ViewMut::new(&mut out, taps, pairs).split_columns(width).into_par_iter().enumerate().for_each(|(row, mut part)| {
        for column in 0..width {
            let pair = if transposed { column * shape.inputs + row } else { row * shape.inputs + column };
            for (tap, &value) in weight[pair * taps..][..taps].iter().enumerate() {
                part.row(if transposed { taps - 1 - tap } else { tap })[column] = value;
            }
        }
    });
    out
}

/// A copy with zeros around each channel.
struct Padded {
    values: Vec<f32>,
    channels: usize,
    size: [usize; 3],
}

impl Padded {
    /// `before` zeros in front of each axis, `size` in all.
    fn new(x: &[f32], channels: usize, inner: [usize; 3], before: [usize; 3], size: [usize; 3]) -> Self {
        let [frames, rows, columns] = size;
        let mut values = vec![0.0; channels * frames * rows * columns];
        values.par_chunks_mut(frames * rows * columns).enumerate().for_each(|(c, channel)| {
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
        View::new(&self.values, self.channels, frames * rows * columns).columns(start..start + length)
    }
}

fn padded_input(shape: Shape, x: &[f32]) -> Padded {
    let size = std::array::from_fn(|i| shape.size[i] + 2 * shape.padding[i]);
    Padded::new(x, shape.inputs, shape.size, shape.padding, size)
}

fn tap_offsets(kernel: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    let [frames, rows, columns] = kernel;
    (0..frames * rows * columns).map(move |tap| [tap / (rows * columns), tap / columns % rows, tap % columns])
}

fn correlate(shape: Shape, x: &[f32], taps: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let Some([frames, rows, columns]) = shape.output() else { return Vec::new() };
    let x = padded_input(shape, x);
    let stride = x.size[2];
    let pairs = shape.inputs * shape.outputs;
    let mut y = vec![0.0; shape.outputs * frames * rows * columns];
    // As many rows as the cache holds (with fewer positions packing the weight would show), a task for each thread.
    let positions = (PART / shape.inputs.max(shape.outputs).max(1)).clamp(256, 1024);
    let enough = (frames * rows).div_ceil(rayon::current_num_threads());
    let height = (positions / stride).max(1).min(enough).min(rows);
    let tasks: Vec<_> = ViewMut::new(&mut y, shape.outputs, frames * rows * columns)
        .split_columns(rows * columns)
        .into_iter()
        .enumerate()
        .flat_map(|(t, frame)| {
            let stretches = frame.stretches(height * columns).into_iter().enumerate();
            stretches.map(move |(i, part)| (t, i * height, part)).collect::<Vec<_>>()
        })
        .collect();
    tasks.into_par_iter().for_each_init(
        || vec![0.0; shape.outputs * height * stride],
        |scratch, (t, first, mut part)| {
            let length = (height.min(rows - first) - 1) * stride + columns;
            let sums = &mut scratch[..shape.outputs * length];
            let mut sum = ViewMut::new(sums, shape.outputs, length);
            for (tap, [kt, kr, kc]) in tap_offsets(shape.kernel).enumerate() {
                let weight = View::new(&taps[tap * pairs..][..pairs], shape.outputs, shape.inputs);
                let seen = x.from([t + kt, first + kr, kc], length);
                sum.product(weight, seen, 1.0, tap > 0, Threads::One);
            }
            for (c, sums) in sums.chunks_exact(length).enumerate() {
                let bias = bias.map_or(0.0, |bias| bias[c]);
                for (row, sums) in part.row(c).chunks_exact_mut(columns).zip(sums.chunks(stride)) {
                    row.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum + bias);
                }
            }
        },
    );
    y
}

fn weight_gradient(shape: Shape, output: [usize; 3], x: &[f32], d_y: &[f32]) -> Vec<f32> {
    let (taps, pairs) = (shape.taps(), shape.inputs * shape.outputs);
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
