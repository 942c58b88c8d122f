//! Sizes of a 3-d convolution, its padded input and the taps of its kernel.

use rayon::prelude::*;

use super::matrix::View;
use super::parallel::{ELEMENT_COST, min_items_per_task};
use super::tile::NR;

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    pub inputs: usize,
    pub outputs: usize,
    /// Frames, rows and columns of the input.
    pub size: [usize; 3],
    /// Frames, rows and columns of the kernel.
    pub kernel: [usize; 3],
    /// Zeros on both sides of each axis; less than the kernel size.
    pub padding: [usize; 3],
}

impl ConvShape {
    /// Frames, rows and columns of the output; `None` if the kernel does not fit.
    pub fn output(&self) -> Option<[usize; 3]> {
        let mut out = [0; 3];
        for (i, out) in out.iter_mut().enumerate() {
            let padded = self.size[i] + 2 * self.padding[i];
            *out = (padded + 1).checked_sub(self.kernel[i]).filter(|&n| n > 0 && self.kernel[i] > 0)?;
        }
        Some(out)
    }

    /// The convolution that computes the input's cotangent from the output's.
    pub fn transposed(&self, output: [usize; 3]) -> Self {
        let padding = std::array::from_fn(|i| self.kernel[i] - 1 - self.padding[i]);
        Self { inputs: self.outputs, outputs: self.inputs, size: output, kernel: self.kernel, padding }
    }
}

/// The convolution that a weight is packed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvKind {
    /// The convolution itself.
    Forward,
    /// The convolution that computes the input's cotangent from the output's. In the weight, inputs and outputs are
    /// swapped, and taps are reversed.
    Transposed,
}

/// Cost of copying a number, in multiply-adds: it is not processed, only read and written.
const COPY_COST: usize = ELEMENT_COST / 4;

/// A zero-padded copy of a tensor.
pub struct Padded {
    /// `[channels, size]`, followed by [`NR`] zeros that the last tile may read.
    pub values: Vec<f32>,
    channels: usize,
    /// Frames, rows and columns.
    pub size: [usize; 3],
}

impl Padded {
    /// Pads the input `x` of a convolution.
    pub fn input(shape: ConvShape, x: &[f32]) -> Self {
        let size = std::array::from_fn(|i| shape.size[i] + 2 * shape.padding[i]);
        Self::new(x, shape.inputs, shape.size, shape.padding, size)
    }

    /// Pads x `[channels, inner]` to `[channels, size]`, with `before` zeros before each axis and the rest after it.
    pub fn new(x: &[f32], channels: usize, inner: [usize; 3], before: [usize; 3], size: [usize; 3]) -> Self {
        let [frames, rows, columns] = size;
        let mut values = vec![0.0; channels * frames * rows * columns + NR];
        values[..channels * frames * rows * columns]
            .par_chunks_mut((frames * rows * columns).max(1))
            .with_min_len(min_items_per_task(frames * rows * columns * COPY_COST))
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

    /// The matrix `[channels, length]` of consecutive values from the position (frame, row, column) on.
    pub fn span_from(&self, [t, r, c]: [usize; 3], length: usize) -> View<'_> {
        let [frames, rows, columns] = self.size;
        let start = (t * rows + r) * columns + c;
        View::new(&self.values[..self.channels * frames * rows * columns], self.channels, frames * rows * columns)
            .columns(start..start + length)
    }
}

/// Frame, row and column of each tap.
pub fn tap_offsets(kernel: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    let [frames, rows, columns] = kernel;
    (0..frames * rows * columns).map(move |tap| [tap / (rows * columns), tap / columns % rows, tap % columns])
}
