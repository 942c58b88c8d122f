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
        let conditioning = model.encode(&conditioning_input(sample, &sample.prompt)?)?;
        Ok(Self { latents: model.encode_video(sample.clip()?.frames())?, conditioning })
    }

    /// Number of leading frames of the latents that the conditioning fixes. An end image fixes none: it enters the
    /// conditioning channels.
    pub(super) fn known_frames(&self) -> usize {
        usize::from(self.conditioning.first_frame.is_some())
    }

    /// Whether the conditioning fixes all frames.
    pub(super) fn has_nothing_to_predict(&self) -> bool {
        self.latents.shape()[1] <= self.known_frames()
    }
}

impl Bytes for EncodedClip {
    fn bytes(&self) -> usize {
        self.latents.as_bytes().len() + self.conditioning.bytes()
    }
}

/// The prompt with the first and last frame of the clip. They condition the model on the clip itself, so the
/// pictures of the row are not used.
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
