//! Reads and accumulates windows of a video or of latents in host memory.

use std::ops::Range;

/// Layout of a host tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Volume {
    pub channels: usize,
    pub frames: usize,
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
    pub fn shape(&self) -> [usize; 4] {
        let [h, w] = self.size;
        match self.frames_first {
            true => [self.frames, self.channels, h, w],
            false => [self.channels, self.frames, h, w],
        }
    }

    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Shape of a window, `[C, T, H, W]`.
    pub fn window_shape(&self, window: &Window) -> [usize; 4] {
        [self.channels, window.frames.len(), window.rows.len(), window.columns.len()]
    }

    /// Reads a window as `[C, T, H, W]`, multiplied by the blend weight of each pixel.
    pub fn read(&self, from: &[f32], window: &Window, blend: Option<&[f32]>) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.window_shape(window).iter().product());
        self.rows(window, |row, at| {
            let source = &from[at];
            match blend {
                None => values.extend_from_slice(source),
                Some(blend) => {
                    let blend = &blend[row * source.len()..][..source.len()];
                    values.extend(source.iter().zip(blend).map(|(v, s)| v * s));
                }
            }
        });
        values
    }

    /// Adds `[C, T, H, W]` values to a window, multiplied by the blend weight of each pixel.
    pub fn add(&self, into: &mut [f32], window: &Window, values: &[f32], blend: Option<&[f32]>) {
        let mut rest = values;
        self.rows(window, |row, at| {
            let target = &mut into[at];
            let (source, tail) = rest.split_at(target.len());
            rest = tail;
            match blend {
                None => target.iter_mut().zip(source).for_each(|(t, v)| *t += v),
                Some(blend) => {
                    let blend = &blend[row * source.len()..][..source.len()];
                    target.iter_mut().zip(source).zip(blend).for_each(|((t, v), s)| *t += v * s);
                }
            }
        });
    }

    /// Calls `f` with each row of the window in `[C, T, H]` order: its index in the window, and its range in the
    /// volume.
    fn rows(&self, window: &Window, mut f: impl FnMut(usize, Range<usize>)) {
        let [h, w] = self.size;
        for c in 0..self.channels {
            for t in window.frames.clone() {
                let plane = if self.frames_first { t * self.channels + c } else { c * self.frames + t };
                for (row, y) in window.rows.clone().enumerate() {
                    let start = (plane * h + y) * w;
                    f(row, start + window.columns.start..start + window.columns.end);
                }
            }
        }
    }
}
