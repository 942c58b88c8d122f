//! Frames as the input of a vision-language network, and the pullback of this step.

use roll_core::{Grad, Medium, Pullback, Result, Tensor, Video, VisionLanguageFacts};

use super::PixelLimits;
use crate::picture::{Filter, Resize};

/// Mean of each colour over CLIP's training data, in [0, 1]: `image_mean` of the processors of Qwen2-VL.
const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
/// Standard deviation of each colour: `image_std` of the processors.
const STD: [f32; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];

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
    fn input_len(&self) -> usize {
        self.frames.len() * 3 * self.size[0] * self.size[1]
    }

    /// Adds to `gradient`, of the video's length, the frames' part of `cotangent`, of the input's length. Values that
    /// were clamped have no gradient.
    fn pull(&self, cotangent: &[f32], gradient: &mut [f32]) -> Result<()> {
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

/// The gradient of a video, `[T, 3, H, W]`, from the cotangents of all values of `media` (rank 1, one medium after
/// another), times `factor`. All media are of the same video.
pub fn pull_all(media: &[Pixels], cotangent: &[f32], factor: f32, video: &[usize]) -> Result<Tensor> {
    let mut gradient = vec![0.0; video.iter().product()];
    let mut rest = cotangent;
    for pixels in media {
        let (part, others) = rest.split_at(pixels.input_len());
        pixels.pull(part, &mut gradient)?;
        rest = others;
    }
    gradient.iter_mut().for_each(|g| *g *= factor);
    Tensor::new(gradient, video)
}

/// The pullback of a score that is the mean over several reads, each of which has been pulled back: `d_pixels` is the
/// sum of the cotangents of all values of `media`, `share` the weight of a read. `None` if the score is not
/// differentiated.
pub fn mean_pullback(
    media: Vec<Pixels>,
    d_pixels: Vec<f32>,
    share: f64,
    video: &Video,
    grad: Grad,
) -> Option<Pullback> {
    let shape = video.frames().shape().to_vec();
    grad.is_on().then(|| {
        Pullback::new(move |cotangent| {
            pull_all(&media, &d_pixels, (f64::from(cotangent.item()?) * share) as f32, &shape)
        })
    })
}
