//! The encoded clip of a sample: its latents and its conditioning.

use roll_core::{ConditionInput, Conditioning, DiffusionModel, Result, Sample, Tensor};

use crate::sample_cache::Bytes;

/// A clip as the transformer sees it.
pub(super) struct EncodedClip {
    /// `[C, T, H, W]`.
    pub(super) latents: Tensor,
    pub(super) conditioning: Conditioning,
}

impl EncodedClip {
    pub(super) fn new(model: &mut dyn DiffusionModel, sample: &Sample) -> Result<Self> {
        let conditioning = model.encode(&input(sample, &sample.prompt)?)?;
        Ok(Self { latents: model.encode_video(sample.clip()?.frames())?, conditioning })
    }

    /// Number of frames of the latents that the model is given.
    pub(super) fn known_frames(&self) -> usize {
        usize::from(self.conditioning.first_frame.is_some())
    }

    /// Whether the model is given all frames, so that nothing is left to predict.
    pub(super) fn is_known(&self) -> bool {
        self.latents.shape()[1] <= self.known_frames()
    }
}

impl Bytes for EncodedClip {
    fn bytes(&self) -> usize {
        self.latents.as_bytes().len() + self.conditioning.bytes()
    }
}

/// The prompt with the first and last frame of the clip. The model learns to continue the clip, so the reference
/// picture of the row is not used.
pub(super) fn input(sample: &Sample, prompt: &str) -> Result<ConditionInput> {
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
