//! 2-d max pooling on the CPU, and its gradient.

use std::ops::Range;

use rayon::prelude::*;

use super::simd::vectorised;
use crate::ops::MaxPoolWindow;

/// Window and sizes of one call. Axes are rows, columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPoolShape {
    pub window: MaxPoolWindow,
    /// Items times channels.
    pub planes: usize,
    /// Rows and columns of the input.
    pub size: [usize; 2],
    pub output: [usize; 2],
}

/// Minimum number of elements that a task reads.
const MIN_READS_PER_TASK: usize = 1 << 16;

impl MaxPoolShape {
    fn planes_per_task(&self) -> usize {
        MIN_READS_PER_TASK
            .div_ceil((self.output[0] * self.output[1] * self.window.kernel[0] * self.window.kernel[1]).max(1))
    }

    /// The input rows that the windows of an output row read.
    fn rows(self, row: usize) -> impl Iterator<Item = usize> {
        let [(before, _), _] = self.window.padding;
        let input_row_of =
            move |tap: usize| (row * self.window.stride[0] + tap * self.window.dilation[0]).checked_sub(before);
        (0..self.window.kernel[0]).filter_map(input_row_of).filter(move |input_row| *input_row < self.size[0])
    }

    /// The output columns for which column `tap` of the window is in bounds, and the input column that the first of
    /// these output columns reads.
    fn columns(&self, tap: usize) -> (Range<usize>, usize) {
        // Output column c reads input column c * step + offset - before.
        let [_, (before, _)] = self.window.padding;
        let (step, offset) = (self.window.stride[1], tap * self.window.dilation[1]);
        let first = before.saturating_sub(offset).div_ceil(step).min(self.output[1]);
        let end = (self.size[1] + before).saturating_sub(offset).div_ceil(step).clamp(first, self.output[1]);
        (first..end, (first * step + offset).saturating_sub(before))
    }
}

/// Max-pools x `[planes, size]` to `[planes, output]`. NaN is larger than any number; the result of a window outside of
/// the input is negative infinity.
pub fn forward(shape: MaxPoolShape, x: &[f32]) -> Vec<f32> {
    let ([rows, columns], [output_rows, output_columns]) = (shape.size, shape.output);
    assert_eq!(x.len(), shape.planes * rows * columns, "the input of {shape:?}");
    let mut y = vec![0.0; shape.planes * output_rows * output_columns];
    if !x.is_empty() && !y.is_empty() {
        let planes = y.par_chunks_mut(output_rows * output_columns).zip(x.par_chunks(rows * columns));
        planes.with_min_len(shape.planes_per_task()).for_each(|(y, x)| pool_plane(shape, x, y));
    }
    y
}

vectorised! {
    fn pool_plane<M>(shape: MaxPoolShape, x: &[f32], y: &mut [f32]) {
        for (row, y) in y.chunks_exact_mut(shape.output[1]).enumerate() {
            y.fill(f32::NEG_INFINITY);
            for input_row in shape.rows(row) {
                let x = &x[input_row * shape.size[1]..][..shape.size[1]];
                for tap in 0..shape.window.kernel[1] {
                    let (columns, first_input) = shape.columns(tap);
                    if columns.is_empty() {
                        continue;
                    }
                    let (y, x) = (&mut y[columns], &x[first_input..]);
                    // Common strides as constants, so that the compiler uses vector registers.
                    match shape.window.stride[1] {
                        1 => max_into(y, x.iter()),
                        2 => {
                            let (last, pairs) = (y.len() - 1, x.as_chunks::<2>().0);
                            max_into(&mut y[..last], pairs.iter().map(|pair| &pair[0]));
                            max_into(&mut y[last..], x[2 * last..].iter());
                        }
                        step => max_into(y, x.iter().step_by(step)),
                    }
                }
            }
        }
    }
}

/// Replaces each element of y by the larger of the elements of y and x; NaN if either is NaN.
#[inline(always)]
fn max_into<'a>(y: &mut [f32], x: impl Iterator<Item = &'a f32>) {
    for (y, x) in y.iter_mut().zip(x) {
        // `NaN <= y` is false, so a NaN of x is taken; a NaN of y is kept explicitly.
        let larger = if *x <= *y { *y } else { *x };
        *y = if y.is_nan() { f32::NAN } else { larger };
    }
}

/// Returns the gradient of x, given the output `y` and its cotangent. Among equal maxima the first receives the
/// gradient; among several NaN, the last.
pub fn backward(shape: MaxPoolShape, x: &[f32], y: &[f32], d_y: &[f32]) -> Vec<f32> {
    let ([rows, columns], [output_rows, output_columns]) = (shape.size, shape.output);
    assert_eq!(x.len(), shape.planes * rows * columns, "the input of {shape:?}");
    assert!(y.len() == shape.planes * output_rows * output_columns && d_y.len() == y.len(), "the output of {shape:?}");
    let mut d_x = vec![0.0; x.len()];
    if !x.is_empty() && !y.is_empty() {
        let outputs = y.par_chunks(output_rows * output_columns).zip(d_y.par_chunks(output_rows * output_columns));
        let planes = d_x.par_chunks_mut(rows * columns).zip(x.par_chunks(rows * columns)).zip(outputs);
        planes.with_min_len(shape.planes_per_task()).for_each_init(Vec::new, |argmax, ((d_x, x), (y, d_y))| {
            for row in 0..output_rows {
                let of_row = row * output_columns..(row + 1) * output_columns;
                row_backward(shape, row, x, &y[of_row.clone()], &d_y[of_row], argmax, d_x);
            }
        });
    }
    d_x
}

/// Adds the cotangents of an output row to the inputs that are the maxima. `argmax` is scratch memory for the index in
/// the plane of each output's maximum.
fn row_backward(
    shape: MaxPoolShape,
    row: usize,
    x: &[f32],
    y: &[f32],
    d_y: &[f32],
    argmax: &mut Vec<Option<usize>>,
    d_x: &mut [f32],
) {
    argmax.clear();
    argmax.resize(y.len(), None);
    for input_row in shape.rows(row) {
        for tap in 0..shape.window.kernel[1] {
            let (columns, first_input) = shape.columns(tap);
            let inputs = (input_row * shape.size[1] + first_input..).step_by(shape.window.stride[1]);
            for ((index, y), at) in argmax[columns.clone()].iter_mut().zip(&y[columns]).zip(inputs) {
                let is_first_maximum = index.is_none() && x[at] == *y;
                if is_first_maximum || x[at].is_nan() {
                    *index = Some(at);
                }
            }
        }
    }
    for (index, d_y) in argmax.iter().zip(d_y) {
        if let Some(index) = index {
            d_x[*index] += d_y;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes() -> impl Iterator<Item = MaxPoolShape> {
        let windows: [([usize; 2], [usize; 2]); 5] =
            [([1, 1], [1, 1]), ([2, 2], [2, 2]), ([3, 3], [2, 2]), ([3, 2], [1, 3]), ([5, 4], [4, 1])];
        let around: [([usize; 2], [usize; 2]); 3] = [([1, 1], [0, 0]), ([1, 1], [1, 2]), ([2, 3], [2, 1])];
        let all = windows.into_iter().flat_map(move |window| around.map(|around| (window, around)));
        all.flat_map(|((kernel, stride), (dilation, before))| {
            [[1usize, 1], [5, 7], [12, 40]].map(|size| (size, kernel, stride, dilation, before))
        })
        .filter_map(|(size, kernel, stride, dilation, before)| {
            let room = |i: usize| (size[i] + 2 * before[i]).checked_sub((kernel[i] - 1) * dilation[i] + 1);
            let output = [room(0)? / stride[0] + 1, room(1)? / stride[1] + 1];
            let window = MaxPoolWindow { kernel, stride, dilation, padding: before.map(|n| (n, n)) };
            Some(MaxPoolShape { window, planes: 3, size, output })
        })
    }

    /// The index of each output's maximum, by a direct search of its window.
    fn argmax(s: MaxPoolShape, x: &[f32]) -> Vec<Option<usize>> {
        let one = |i: usize| {
            let (plane, row, column) =
                (i / (s.output[0] * s.output[1]), i / s.output[1] % s.output[0], i % s.output[1]);
            let mut found: Option<usize> = None;
            let MaxPoolWindow { kernel, stride, dilation, padding } = s.window;
            for tap in 0..kernel[0] * kernel[1] {
                let row = (row * stride[0] + tap / kernel[1] * dilation[0]).checked_sub(padding[0].0);
                let column = (column * stride[1] + tap % kernel[1] * dilation[1]).checked_sub(padding[1].0);
                let (Some(row), Some(column)) = (row, column) else { continue };
                if row < s.size[0] && column < s.size[1] {
                    let at = (plane * s.size[0] + row) * s.size[1] + column;
                    if found.is_none_or(|found| x[at] > x[found] || x[at].is_nan()) {
                        found = Some(at);
                    }
                }
            }
            found
        };
        (0..s.planes * s.output[0] * s.output[1]).map(one).collect()
    }

    #[test]
    fn outputs_and_gradients_match_a_direct_search() {
        for shape in shapes() {
            let count = shape.planes * shape.size[0] * shape.size[1];
            // Few distinct numbers, so that windows contain ties, and one NaN.
            let mut x: Vec<f32> = (0..count).map(|i| (i * 7919 % 13) as f32 - 6.0).collect();
            x[count / 2] = f32::NAN;
            let (y, argmax) = (forward(shape, &x), argmax(shape, &x));
            let expected = argmax.iter().map(|index| index.map_or(f32::NEG_INFINITY, |index| x[index]).to_bits());
            assert!(y.iter().map(|y| y.to_bits()).eq(expected), "{shape:?}");
            let d_y: Vec<f32> = (0..y.len()).map(|i| i as f32 + 1.0).collect();
            let mut d_x = vec![0.0; count];
            argmax.iter().zip(&d_y).for_each(|(index, d)| index.iter().for_each(|index| d_x[*index] += d));
            assert_eq!(backward(shape, &x, &y, &d_y), d_x, "{shape:?}");
        }
    }
}
