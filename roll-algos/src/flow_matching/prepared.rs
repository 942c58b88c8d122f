//! Facts of a sample alone: its latents and its conditioning.

use roll_core::{ConditionInput, Conditioning, DiffusionModel, Result, Sample, Tensor};

use crate::remembered::Bytes;

/// A clip as the transformer sees it.
pub(super) struct Prepared {
    /// `[C, T, H, W]`.
    pub(super) latents: Tensor,
    pub(super) conditioning: Conditioning,
}

impl Prepared {
    pub(super) fn new(model: &mut dyn DiffusionModel, sample: &Sample) -> Result<Self> {
        let conditioning = model.encode(&input(sample, &sample.prompt)?)?;
        Ok(Self { latents: model.encode_video(sample.video.frames())?, conditioning })
    }

    /// Frames of the latents that the model is given.
    pub(super) fn known_frames(&self) -> usize {
        usize::from(self.conditioning.first_frame.is_some())
    }
}

impl Bytes for Prepared {
    fn bytes(&self) -> usize {
        self.latents.as_bytes().len() + self.conditioning.bytes()
    }
}

/// The pictures are the clip's own: the model learns to continue the clip, not the row's reference picture.
pub(super) fn input(sample: &Sample, prompt: &str) -> Result<ConditionInput> {
    let [frames, height, width] = sample.video.dims();
    let picture = |t: usize| Tensor::new(sample.video.frame(t).to_vec(), [3, height, width]);
    Ok(ConditionInput {
        prompt: prompt.into(),
        image: Some(picture(0)?),
        end_image: Some(picture(frames - 1)?),
        frames,
        size: [height, width],
    })
}
