//! Options of reading a clip.

use crate::config::Decoder;

/// The size of the returned frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sizing {
    /// Native size, in square pixels.
    #[default]
    Native,
    /// The size of [`target_size`](crate::target_size).
    MaxPixels {
        /// At most about this many pixels.
        pixels: usize,
        /// Height and width are multiples of these.
        unit: [usize; 2],
    },
    /// Exactly this height and width, by [`crop_and_resize`](crate::crop_and_resize).
    Exact([usize; 2]),
}

/// Which frames to read, and their size.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReadOptions {
    /// Leave out this many frames before the first.
    pub skip: usize,
    /// Stop after this many frames.
    pub max_frames: Option<usize>,
    /// Sample frames at this rate (the frames shown at those times) instead of reading all.
    pub fps: Option<f64>,
    /// Keep every N-th frame; 0 and 1 keep all.
    pub every: usize,
    /// Size of the frames.
    pub sizing: Sizing,
    /// The decoder.
    pub decoder: Decoder,
}
