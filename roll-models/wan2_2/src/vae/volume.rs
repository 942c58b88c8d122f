//! Reads windows of a video or of latents in host memory, and adds values to windows. A window's values are in the
//! order `[C, T, H, W]`, whatever the order in memory.

use std::ops::Range;

/// Layout of a host tensor. The values themselves are passed to each function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Volume {
    pub channels: usize,
    pub frames: usize,
    /// Height and width.
    pub size: [usize; 2],
    /// Whether the order is `[T, C, H, W]` (videos) instead of `[C, T, H, W]` (latents).
    pub frames_first: bool,
}

/// A range of frames, rows and columns, in all channels.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pub frames: Range<usize>,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
}

impl Volume {
    /// Shape in the order in memory.
    pub fn shape(&self) -> [usize; 4] {
        let [h, w] = self.size;
        if self.frames_first { [self.frames, self.channels, h, w] } else { [self.channels, self.frames, h, w] }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Shape of a window, `[C, T, H, W]`.
    pub fn window_shape(&self, window: &Window) -> [usize; 4] {
        [self.channels, window.frames.len(), window.rows.len(), window.columns.len()]
    }

    /// Reads a window of the values `from` as `[C, T, H, W]`. With `blend`, each value is multiplied by the weight of
    /// its pixel: `blend` has one weight per row and column of the window, row-major.
    pub fn read(&self, from: &[f32], window: &Window, blend: Option<&[f32]>) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.window_shape(window).iter().product());
        self.for_each_row(window, |row, range| {
            let source = &from[range];
            match blend {
                None => values.extend_from_slice(source),
                Some(blend) => {
                    let weights = &blend[row * source.len()..][..source.len()];
                    values.extend(source.iter().zip(weights).map(|(value, weight)| value * weight));
                }
            }
        });
        values
    }

    /// Adds `values`, `[C, T, H, W]`, to a window of the values `into`. `blend` is as in [`Volume::read`].
    pub fn add(&self, into: &mut [f32], window: &Window, values: &[f32], blend: Option<&[f32]>) {
        let mut remaining = values;
        self.for_each_row(window, |row, range| {
            let target = &mut into[range];
            let (source, later) = remaining.split_at(target.len());
            remaining = later;
            match blend {
                None => target.iter_mut().zip(source).for_each(|(sum, value)| *sum += value),
                Some(blend) => {
                    let weights = &blend[row * source.len()..][..source.len()];
                    let terms = source.iter().zip(weights);
                    target.iter_mut().zip(terms).for_each(|(sum, (value, weight))| *sum += value * weight);
                }
            }
        });
    }

    /// Calls `f` with each row of the window, in the order `[C, T, H]`: the row's number within its frame of the
    /// window, and the range of its values in memory.
    fn for_each_row(&self, window: &Window, mut f: impl FnMut(usize, Range<usize>)) {
        let [h, w] = self.size;
        for c in 0..self.channels {
            for t in window.frames.clone() {
                // Number of this channel's frame in memory, in which all frames of all channels follow one another.
                let plane = if self.frames_first { t * self.channels + c } else { c * self.frames + t };
                for (row, y) in window.rows.clone().enumerate() {
                    let start = (plane * h + y) * w;
                    f(row, start + window.columns.start..start + window.columns.end);
                }
            }
        }
    }
}
