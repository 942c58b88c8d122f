//! Pictures and frames as the input of a vision-language network (Qwen2-VL, Qwen2.5-VL), and the pullback of this step.

use roll_core::{Error, Medium, Result, Tensor, Video, VisionLanguageFacts};

use crate::picture::Picture;
use crate::resample::{Filter, Resize};

/// Greatest ratio of the sides of a picture.
const MAX_ASPECT: usize = 200;
/// Pictures with fewer pixels are enlarged: `min_pixels` of the processors of Qwen2-VL and Qwen2.5-VL.
const MIN_PIXELS: usize = 56 * 56;

/// Mean of each colour over CLIP's training data, in [0, 1]: `image_mean` of the processors of Qwen2-VL.
pub const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
/// Standard deviation of each colour: `image_std` of the processors.
pub const STD: [f32; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];

/// The multiple of `factor` nearest to `value`; half to even, as Python rounds.
pub fn nearest_multiple(value: f64, factor: usize) -> usize {
    (value / factor as f64).round_ties_even() as usize * factor
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
    /// The limits of a published processor with at most `max` pixels.
    pub fn of_processor(max: usize) -> Self {
        Self { min: MIN_PIXELS.min(max), max }
    }

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

/// The frames of one picture or clip, prepared for a network: clamped to [-1, 1], mapped to [0, 1], resized by an
/// antialiased bicubic filter (a = -0.5, overshoot kept), normalised per colour. No step rounds to 8 bits, so all have a
/// gradient.
#[derive(Clone, Debug)]
pub struct Pixels {
    /// The frames of the video, `[T, 3, H, W]`.
    video: Tensor,
    /// Indices of the prepared frames. A picture is one frame, repeated; repeated frames add their gradients.
    frames: Vec<usize>,
    /// Height and width after resizing.
    size: [usize; 2],
    resize: Resize,
}

impl Pixels {
    /// Prepares `frames` of `video`; the last one is repeated up to a multiple of the frames of a patch. Fails if the
    /// frames have no pixels, or a ratio of the sides that the networks do not take.
    pub fn new(
        video: &Video,
        mut frames: Vec<usize>,
        limits: PixelLimits,
        facts: &VisionLanguageFacts,
    ) -> Result<Self> {
        let [_, height, width] = video.dims();
        let size = limits.fit([height, width], facts.side_multiple())?;
        if let Some(last) = frames.last().copied() {
            frames.resize(frames.len().next_multiple_of(facts.patch_frames), last);
        }
        let resize = Resize::new([height, width], size, Filter::Bicubic);
        Ok(Self { video: video.frames().clone(), frames, size, resize })
    }

    /// Prepares one picture; see [`Pixels::new`].
    pub fn of_picture(picture: &roll_core::Picture, limits: PixelLimits, facts: &VisionLanguageFacts) -> Result<Self> {
        let planes = Picture::from(picture).to_tensor()?;
        let frames_per_second = 1.0;
        let video = Video::new(planes.reshape([&[1], planes.shape()].concat())?, frames_per_second)?;
        Self::new(&video, vec![0], limits, facts)
    }

    /// Values of a frame before resizing.
    fn frame_len(&self) -> usize {
        self.video.shape()[1..].iter().product()
    }

    /// The resized frames in [0, 1] up to overshoot, f32 `[n, 3, h, w]` as a flat vector.
    pub fn resized(&self) -> Result<Vec<f32>> {
        let (video, len) = (self.video.f32s()?, self.frame_len());
        let mut resized = Vec::with_capacity(self.frames.len() * 3 * self.size[0] * self.size[1]);
        for t in &self.frames {
            let unit: Vec<f32> = video[t * len..][..len].iter().map(|v| v.clamp(-1.0, 1.0) / 2.0 + 0.5).collect();
            resized.extend(self.resize.forward(&unit));
        }
        Ok(resized)
    }

    /// The network's input, f32 `[n, 3, h, w]`.
    pub fn medium(&self, seconds_per_step: f64) -> Result<Medium> {
        let [h, w] = self.size;
        let mut pixels = self.resized()?;
        for (i, plane) in pixels.chunks_exact_mut(h * w).enumerate() {
            plane.iter_mut().for_each(|v| *v = (*v - MEAN[i % 3]) / STD[i % 3]);
        }
        Ok(Medium { pixels: Tensor::new(pixels, [self.frames.len(), 3, h, w])?, seconds_per_step })
    }

    /// Number of values of the network's input.
    pub fn input_len(&self) -> usize {
        self.frames.len() * 3 * self.size[0] * self.size[1]
    }

    /// Adds to `gradient`, of the video's length, the frames' part of `cotangent`, of the input's length. Values that
    /// were clamped have no gradient.
    pub fn pull(&self, cotangent: &[f32], gradient: &mut [f32]) -> Result<()> {
        let (video, len, plane) = (self.video.f32s()?, self.frame_len(), self.size[0] * self.size[1]);
        for (t, d_frame) in self.frames.iter().zip(cotangent.chunks_exact(3 * plane)) {
            let d_resized: Vec<f32> = d_frame.iter().enumerate().map(|(i, d)| d / STD[i / plane]).collect();
            let d_unit = self.resize.pull(&d_resized);
            let values = video[t * len..][..len].iter().zip(&mut gradient[t * len..][..len]);
            for ((value, sum), d) in values.zip(d_unit) {
                if (-1.0..=1.0).contains(value) {
                    *sum += d / 2.0;
                }
            }
        }
        Ok(())
    }
}
