//! Options of reading a clip.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

/// Which frames to read, and their size. The frames are resampled to `fps`, then every `every`-th frame is selected,
/// then the first `skip` selected frames are left out, then at most `max_frames` are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReadOptions {
    /// Leave out this many of the frames that `fps` and `every` select.
    pub skip: usize,
    /// Stop after this many returned frames.
    pub max_frames: Option<usize>,
    /// Sample frames at this rate (the frames shown at those times) instead of reading all.
    pub fps: Option<f64>,
    /// Keep every N-th frame, counted at the rate `fps` if there is one; 0 and 1 keep all.
    pub every: usize,
    /// Size of the frames.
    pub sizing: Sizing,
    /// The decoder.
    pub decoder: Decoder,
}

/// The decoder of videos.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decoder {
    /// This crate's reader, and ffmpeg for files that it cannot read.
    #[default]
    Auto,
    /// This crate's reader: H.264 in MP4 and MOV.
    Own,
    /// ffmpeg, for everything except GIF and the images that this crate reads.
    Ffmpeg,
}
