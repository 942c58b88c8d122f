//! The encoded clip of a sample: its latents, its conditioning, and how much each position counts in the loss.

use roll_core::{ConditionInput, Conditioning, DiffusionModel, Error, Result, Sample, Tensor};

use super::loss::velocity_loss;
use crate::sample_cache::Bytes;

/// A clip as the transformer sees it.
pub(super) struct EncodedClip {
    /// `[C, T, H, W]`.
    pub(super) latents: Tensor,
    pub(super) conditioning: Conditioning,
    /// Weight of each position in the loss, `[T, H, W]`; `None` if all positions have the weight 1.
    weights: Option<Vec<f32>>,
}

impl EncodedClip {
    /// Encodes the clip of a sample, its prompt and its mask.
    pub(super) fn new(model: &mut dyn DiffusionModel, sample: &Sample) -> Result<Self> {
        let conditioning = model.encode(&conditioning_input(sample, &sample.prompt)?)?;
        let clip = sample.clip()?;
        let latents = model.encode_video(clip.frames())?;
        let weights = sample.mask.as_ref().map(|mask| pooled(mask, clip.dims(), latents.shape())).transpose()?;
        Ok(Self { latents, conditioning, weights })
    }

    /// The flow-matching loss of a velocity at these latents mixed with `noise`, and its gradient.
    pub(super) fn velocity_loss(&self, velocity: &Tensor, noise: &[f32]) -> Result<(f64, Tensor)> {
        velocity_loss(velocity, &self.latents, noise, self.known_frames(), self.weights.as_deref())
    }

    /// Number of leading frames of the latents that the conditioning fixes. An end image fixes no frame, because it
    /// enters the conditioning channels.
    fn known_frames(&self) -> usize {
        usize::from(self.conditioning.first_frame.is_some())
    }

    /// The reason why nothing of the clip is left to predict; `None` if something is left.
    pub(super) fn nothing_to_predict(&self) -> Option<&'static str> {
        let [_, frames, height, width] = *self.latents.shape() else { return None };
        let given_positions = self.known_frames().min(frames) * height * width;
        if given_positions == frames * height * width {
            return Some("the clip is one latent frame, which the model is given: nothing is left to predict");
        }
        let is_all_masked =
            self.weights.as_ref().is_some_and(|weights| weights[given_positions..].iter().all(|w| *w == 0.0));
        is_all_masked.then_some("the mask of the clip is black wherever something is to be predicted")
    }
}

impl Bytes for EncodedClip {
    fn bytes(&self) -> usize {
        let weights = self.weights.as_ref().map_or(0, |weights| size_of_val(&weights[..]));
        self.latents.as_bytes().len() + self.conditioning.bytes() + weights
    }
}

/// The mean of a mask over the pixels of each position of latents of the shape `latents`. The mask has the clip's size
/// `[frames, height, width]`, or one frame for all. The first frame of the latents covers the first frame of the clip;
/// each later frame of the latents covers an equal part of the other frames.
fn pooled(mask: &Tensor, [frames, height, width]: [usize; 3], latents: &[usize]) -> Result<Vec<f32>> {
    let (&[_, t_count, h_count, w_count], &[mask_frames, mask_height, mask_width]) = (latents, mask.shape()) else {
        return Err(Error::shape("the mask", "[T, H, W]", mask.shape()));
    };
    if ![1, frames].contains(&mask_frames) || [mask_height, mask_width] != [height, width] {
        return Err(Error::shape("the mask", format!("{:?}", [frames, height, width]), mask.shape()));
    }
    let values = mask.f32s()?;
    // Part `i` of `length` pixels or frames that are divided into `count` parts; never empty.
    let part = |i: usize, count: usize, length: usize| {
        let start = i * length / count;
        start..((i + 1) * length / count).max(start + 1)
    };
    let mut means = Vec::with_capacity(t_count * h_count * w_count);
    for t in 0..t_count {
        let clip_frames = match t {
            0 => 0..1,
            _ => {
                // Counted from the second frame of the clip on.
                let later_frames = part(t - 1, t_count - 1, frames - 1);
                later_frames.start + 1..later_frames.end + 1
            }
        };
        for (y, x) in (0..h_count).flat_map(|y| (0..w_count).map(move |x| (y, x))) {
            let (rows, columns) = (part(y, h_count, height), part(x, w_count, width));
            let count = clip_frames.len() * rows.len() * columns.len();
            let row_sum = |start: usize| values[start + columns.start..start + columns.end].iter().sum::<f32>();
            let frame_sum = |frame: usize| {
                let frame = frame.min(mask_frames - 1);
                rows.clone().map(|row| row_sum((frame * height + row) * width)).sum::<f32>()
            };
            means.push(clip_frames.clone().map(frame_sum).sum::<f32>() / count as f32);
        }
    }
    Ok(means)
}

/// The prompt with the first and last frame of the clip. They condition the model on the clip itself, so the
/// reference pictures of the data row are not used.
pub(super) fn conditioning_input(sample: &Sample, prompt: &str) -> Result<ConditionInput> {
    let clip = sample.clip()?;
    let [frames, height, width] = clip.dims();
    let picture = |t: usize| Tensor::new(clip.frame(t).to_vec(), [3, height, width]);
    Ok(ConditionInput {
        prompt: prompt.into(),
        image: Some(picture(0)?),
        end_image: Some(picture(frames - 1)?),
        frames,
        size: [height, width],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_averaged_over_the_pixels_of_each_position_of_the_latents() {
        let latents = [3, 2, 1, 2];
        // Frame t has t in its left half, and 10 t in its right half.
        let values = (0..5 * 2 * 4).map(|i| (i / 8) as f32 * if i % 4 < 2 { 1.0 } else { 10.0 }).collect();
        let moving = Tensor::new(values, [5, 2, 4]).unwrap();
        // The first frame, then the mean of the frames 1 to 4.
        assert_eq!(pooled(&moving, [5, 2, 4], &latents).unwrap(), [0.0, 0.0, 2.5, 25.0]);
        let still = Tensor::new(vec![1.0, 0.0, 0.5, 0.5, 1.0, 1.0, 0.0, 1.0], [1, 2, 4]).unwrap();
        assert_eq!(pooled(&still, [5, 2, 4], &latents).unwrap(), [0.75, 0.5, 0.75, 0.5]);
        for wrong in [[2, 2, 4], [5, 4, 2]] {
            let told = pooled(&Tensor::zeros(wrong), [5, 2, 4], &latents).unwrap_err().to_string();
            assert!(told.contains("the mask") && told.contains("[5, 2, 4]"), "{told}");
        }
    }
}
