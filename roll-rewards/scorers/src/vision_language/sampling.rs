//! Which frames of a clip a network sees: `vision_process.py` of VideoAlign, which follows `qwen-vl-utils`. All roundings
//! are half to even, as Python's.

use roll_media::nearest_multiple;

/// Greatest number of frames.
pub const MAX_FRAMES: usize = 768;
/// Smallest number of frames, unless the clip is shorter.
const MIN_FRAMES: f64 = 4.0;

/// How densely a clip is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// Frames per second of the clip.
    Rate(f64),
    /// Number of frames; rounded to an even number, and at most the frames of the clip.
    Count(usize),
}

impl Sampling {
    /// Indices of the sampled frames among `total` frames at `fps`: equally spaced, the first and the last included.
    /// The number is even, except if [`Sampling::Count`] exceeds an odd `total`. `None` if fewer than 2 frames result.
    pub fn indices(self, total: usize, fps: f64) -> Option<Vec<usize>> {
        let count = match self {
            Self::Count(count) => (nearest_multiple(count as f64, 2)).min(total),
            Self::Rate(rate) => {
                let largest = MAX_FRAMES.min(total) / 2 * 2;
                let wanted = total as f64 / fps * rate;
                nearest_multiple(wanted.max(MIN_FRAMES).min(largest as f64), 2)
            }
        };
        (count >= 2).then(|| linspace(total - 1, count))
    }
}

/// `torch.linspace(0, last, count).round()`: torch computes in f32, and the second half from the end.
fn linspace(last: usize, count: usize) -> Vec<usize> {
    let step = last as f32 / (count - 1) as f32;
    let at = |i: usize| if i < count / 2 { step * i as f32 } else { last as f32 - step * (count - 1 - i) as f32 };
    (0..count).map(|i| at(i).round_ties_even() as usize).collect()
}
