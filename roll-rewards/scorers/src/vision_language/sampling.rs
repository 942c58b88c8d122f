//! Which frames of a clip a network sees, and in which size: `vision_process.py` of VideoAlign, which follows
//! `qwen-vl-utils`. All roundings are half to even, as Python's.

use roll_core::{Error, Result};

/// Greatest number of frames.
pub const MAX_FRAMES: usize = 768;
/// Smallest number of frames, unless the clip is shorter.
const MIN_FRAMES: f64 = 4.0;
/// Greatest ratio of the sides of a picture.
const MAX_ASPECT: usize = 200;

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

/// The multiple of `factor` nearest to `value`.
fn nearest_multiple(value: f64, factor: usize) -> usize {
    (value / factor as f64).round_ties_even() as usize * factor
}

/// `torch.linspace(0, last, count).round()`: torch computes in f32, and the second half from the end.
fn linspace(last: usize, count: usize) -> Vec<usize> {
    let step = last as f32 / (count - 1) as f32;
    let at = |i: usize| if i < count / 2 { step * i as f32 } else { last as f32 - step * (count - 1 - i) as f32 };
    (0..count).map(|i| at(i).round_ties_even() as usize).collect()
}

/// Bounds for the number of pixels of a picture after resizing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelLimits {
    /// Smaller pictures are enlarged.
    pub min: usize,
    /// Larger pictures are reduced.
    pub max: usize,
}

impl PixelLimits {
    /// The `[height, width]` to which a picture of `[height, width]` is resized: multiples of `factor` near the
    /// picture's aspect ratio (`smart_resize`). Fails on an empty picture and on a ratio above 200.
    pub fn fit(self, [height, width]: [usize; 2], factor: usize) -> Result<[usize; 2]> {
        let sides = [height, width];
        let (shorter, longer) = (height.min(width), height.max(width));
        if shorter == 0 || longer > MAX_ASPECT * shorter {
            let expected = format!("[height, width], neither 0, with a ratio of at most {MAX_ASPECT}");
            return Err(Error::shape("picture", expected, &sides));
        }
        let area = height as f64 * width as f64;
        let fitted = sides.map(|side| nearest_multiple(side as f64, factor).max(factor));
        let multiple = |side: f64, round: fn(f64) -> f64| (round(side / factor as f64) as usize * factor).max(factor);
        Ok(match fitted[0] * fitted[1] {
            product if product > self.max => {
                let reduction = (area / self.max as f64).sqrt();
                sides.map(|side| multiple(side as f64 / reduction, f64::floor))
            }
            product if product < self.min => {
                let enlargement = (self.min as f64 / area).sqrt();
                sides.map(|side| multiple(side as f64 * enlargement, f64::ceil))
            }
            _ => fitted,
        })
    }
}
