//! The facts of a clip that are known without decoding it.

use crate::frames::times_before;

/// Size, length and frame rate of a clip.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probed {
    /// Height and width as shown, in square pixels.
    pub size: [usize; 2],
    /// Number of frames.
    pub frames: usize,
    /// Mean number of frames per second.
    pub fps: f64,
}

impl Probed {
    /// Number of frames at another rate.
    pub fn frames_at(&self, fps: f64) -> usize {
        times_before(self.frames as f64 / self.fps, fps)
    }
}
