//! Scores of generated videos, for every algorithm with a reward on videos: the reward's target, its score with the
//! policy for missing scores, and the evaluation of a configuration.

mod evaluation;
mod measure;
mod prepared;

use std::sync::Arc;

use roll_core::{DiffusionModel, Result, Sample, Tensor, Video};

pub(crate) use evaluation::{Generation, evaluate};
pub(crate) use measure::{Measured, pull_frames};
pub(crate) use prepared::{Prepared, PreparedTarget};

/// Frames per second of generated videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FrameRate {
    /// The model's frame rate, or the clip's if the model has none.
    Model,
    /// The frame rate of the sample's clip.
    Clip,
}

/// The video or picture that the reward compares the generated video with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// All frames of the sample's clip, as in the reference implementation.
    Clip,
    /// The first frame of the clip.
    FirstFrame,
    /// The sample's picture, or the clip's first frame for a sample without a picture.
    Image,
}

impl FrameRate {
    /// Frames per second of the video generated for `sample`.
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
