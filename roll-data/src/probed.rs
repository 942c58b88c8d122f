//! The facts of a clip that are known without decoding it.

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
