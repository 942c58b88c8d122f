//! Generated videos and their scores, for every algorithm with a reward on videos.

mod evaluation;
mod measure;
mod prepared;

use std::sync::Arc;

use roll_core::{DiffusionModel, Result, Sample, Tensor, Video};

pub(crate) use evaluation::{Generation, evaluate};
pub(crate) use measure::{Measured, pull_frames};
pub(crate) use prepared::{Prepared, Prospect};

/// Frames a second of generated videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FrameRate {
    /// As the model says; as the clip where it does not.
    Model,
    /// As the sample's clip, frame for frame beside it.
    Clip,
}

/// The video or picture that the reward compares the generated video with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// All frames of the sample's clip: as the reference.
    Clip,
    /// The first frame of the clip.
    FirstFrame,
    /// The sample's picture, or the first frame where it has none.
    Image,
}

impl FrameRate {
    /// Frames a second of the video generated for `sample`.
    pub(crate) fn of(self, model: &dyn DiffusionModel, sample: &Sample) -> f64 {
        match self {
            Self::Model => model.frame_rate().unwrap_or_else(|| sample.video.fps()),
            Self::Clip => sample.video.fps(),
        }
    }
}

/// The video that the reward compares the sample's result with.
pub fn reference_video(sample: &Sample, reference: Reference) -> Result<Arc<Video>> {
    let still = |image: Tensor| -> Result<_> {
        let shape = [&[1], image.shape()].concat();
        Ok(Arc::new(Video::new(image.reshape(shape)?, sample.video.fps())?))
    };
    match reference {
        Reference::Clip => Ok(sample.video.clone()),
        Reference::Image => still(sample.reference_image()?),
        Reference::FirstFrame => {
            let [_, height, width] = sample.video.dims();
            still(Tensor::new(sample.video.frame(0).to_vec(), [3, height, width])?)
        }
    }
}
