//! The input that each tap of a 2-d convolution reads. The forward pass is one [`Pass`]. The backward pass consists of
//! one [`Pass`] per phase of the stride (position modulo stride), each of which reads with stride one.

/// Sizes of one call. Axes are rows, columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dShape {
    pub items: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// Number of channel groups; an output channel reads the input channels of its own group.
    pub groups: usize,
    /// Rows and columns of the input.
    pub size: [usize; 2],
    pub kernel: [usize; 2],
    pub stride: [usize; 2],
    pub dilation: [usize; 2],
    /// Zero padding before each axis.
    pub before: [usize; 2],
    pub output: [usize; 2],
}

impl Conv2dShape {
    /// Whether the convolution is depthwise: each output channel reads one input channel.
    pub fn is_depthwise(&self) -> bool {
        self.groups == self.inputs && self.groups == self.outputs
    }

    pub fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// The sizes of the input's gradient: input and output are swapped.
    pub fn swapped(self) -> Self {
        let Self { inputs, outputs, size, output, .. } = self;
        Self { inputs: outputs, outputs: inputs, size: output, output: size, ..self }
    }

    /// The pass that computes the output from the input.
    pub fn forward(&self) -> Pass {
        let offset = |axis: usize, tap: usize| (tap * self.dilation[axis]) as isize - self.before[axis] as isize;
        let [rows, columns] = self.kernel;
        let tap = |index: usize| Tap { index, at: [offset(0, index / columns), offset(1, index % columns)] };
        Pass {
            grid: self.output,
            read_step: self.stride,
            write_step: [1; 2],
            write_first: [0; 2],
            taps: (0..rows * columns).map(tap).collect(),
        }
    }

    /// The passes that compute the cotangent of the input from the cotangent of the output: one per phase of the
    /// stride. Each reads the output's cotangent with stride one and has only the taps that reach its positions, so
    /// that nothing is multiplied by the zeros of a dilated cotangent. Together they write every position once.
    pub fn backward(&self) -> Vec<Pass> {
        // The taps along an axis through which input `position` reaches an output, and the index of that output.
        let taps_along = |axis: usize, position: usize| -> Vec<(usize, isize)> {
            let (stride, before) = (self.stride[axis] as isize, self.before[axis] as isize);
            let strided_output = |tap: usize| position as isize + before - (tap * self.dilation[axis]) as isize;
            let reaches = |&tap: &usize| strided_output(tap).rem_euclid(stride) == 0;
            let output = |tap: usize| (tap, strided_output(tap).div_euclid(stride));
            (0..self.kernel[axis]).filter(reaches).map(output).collect()
        };
        let mut passes = vec![];
        for first_row in 0..self.stride[0].min(self.size[0]) {
            for first_column in 0..self.stride[1].min(self.size[1]) {
                let tap_columns = taps_along(1, first_column);
                let mut taps = vec![];
                for (tap_row, output_row) in taps_along(0, first_row) {
                    for &(tap_column, output_column) in &tap_columns {
                        let index = tap_row * self.kernel[1] + tap_column;
                        taps.push(Tap { index, at: [output_row, output_column] });
                    }
                }
                let first = [first_row, first_column];
                passes.push(Pass {
                    grid: std::array::from_fn(|i| (self.size[i] - first[i]).div_ceil(self.stride[i])),
                    read_step: [1; 2],
                    write_step: self.stride,
                    write_first: first,
                    taps,
                });
            }
        }
        passes
    }
}

/// One tap: position (i, j) of the grid reads its plane at `(i, j) * read_step + at`, if that is in bounds.
#[derive(Clone, Copy, Debug)]
pub struct Tap {
    /// Index in the kernel, row-major.
    pub index: usize,
    /// Read offset in rows and columns.
    pub at: [isize; 2],
}

/// A correlation over a grid of positions: at each, the weighted sum of the inputs that the taps read.
#[derive(Clone, Debug)]
pub struct Pass {
    /// Rows and columns of positions.
    pub grid: [usize; 2],
    /// Distance between the inputs of adjacent positions.
    pub read_step: [usize; 2],
    /// Distance between the outputs of adjacent positions.
    pub write_step: [usize; 2],
    /// Output row and column of the first position.
    pub write_first: [usize; 2],
    pub taps: Vec<Tap>,
}

impl Pass {
    /// Returns the pass and the sizes of the planes that it reads and writes. Merges all rows into one if every
    /// position reads only itself and rows are contiguous in memory.
    pub fn flat(self, read: [usize; 2], written: [usize; 2]) -> (Self, [usize; 2], [usize; 2]) {
        let reads_itself = matches!(self.taps.as_slice(), [Tap { at: [0, 0], .. }]);
        let has_unit_steps = [self.read_step, self.write_step] == [[1; 2]; 2];
        if !(reads_itself && has_unit_steps && read == written && self.grid == read) {
            return (self, read, written);
        }
        let one_row = [1, read[0] * read[1]];
        (Self { grid: one_row, ..self }, one_row, one_row)
    }
}

/// The part of `range` whose positions satisfy `0 <= position * step + at < length`.
pub fn inside(at: isize, step: usize, length: usize, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
    let (step, length) = (step as isize, length as isize);
    // The common case, without divisions.
    let index_of = |position: usize| position as isize * step + at;
    if range.is_empty() || index_of(range.start) >= 0 && index_of(range.end - 1) < length {
        return range;
    }
    // The least position with `position * step + at >= bound`.
    let least = |bound: isize| (bound - at + step - 1).div_euclid(step).max(0) as usize;
    let start = least(0).clamp(range.start, range.end);
    start..least(length).clamp(start, range.end)
}
