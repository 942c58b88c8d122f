//! Scores of generated videos, for every algorithm with a reward on videos: the target that a reward compares with, the
//! score or the treatment of a missing one, and evaluations.

mod evaluation;
mod measure;
mod prepared;

use std::sync::Arc;

use roll_core::{DiffusionModel, Result, Sample, SampleVideo, Tensor, Video};

pub use roll_core::Reference;

pub(crate) use evaluation::{Generation, evaluate};
pub(crate) use measure::{Measured, pull_frames};
pub(crate) use prepared::{Prepared, PreparedTarget};

/// Frames per second of generated videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FrameRate {
    /// The model's frame rate, or the clip's if the model has none.
    Model,
    /// The frame rate of the sample's clip, or the model's for a row without a clip.
    Clip,
}

/// Frames per second of generated videos and of still pictures if neither the model nor the sample's clip has a rate.
const DEFAULT_FPS: f64 = 16.0;

impl FrameRate {
    /// Frames per second of the video generated for `sample`.
    pub(crate) fn of(self, model: &dyn DiffusionModel, sample: &Sample) -> f64 {
        let model_rate = model.frame_rate();
        let clip_rate = sample.video.clip().map(|clip| clip.fps());
        let rate = match self {
            Self::Model => model_rate.or(clip_rate),
            Self::Clip => clip_rate.or(model_rate),
        };
        rate.unwrap_or(DEFAULT_FPS)
    }
}

/// The video that the reward compares the sample's generated video with; `None` for a row without such a reference.
pub fn reference_video(sample: &Sample, reference: Reference) -> Result<Option<Arc<Video>>> {
    let fps = sample.video.clip().map_or(DEFAULT_FPS, |clip| clip.fps());
    let still = |image: Tensor| -> Result<_> {
        let shape = [&[1], image.shape()].concat();
        Ok(Arc::new(Video::new(image.reshape(shape)?, fps)?))
    };
    match (reference, &sample.video) {
        (Reference::Image, _) => sample.reference_image()?.map(still).transpose(),
        (_, SampleVideo::Shape(_)) => Ok(None),
        (Reference::Clip, SampleVideo::Clip(clip)) => Ok(Some(clip.clone())),
        (Reference::FirstFrame, SampleVideo::Clip(clip)) => {
            let [_, height, width] = clip.dims();
            still(Tensor::new(clip.frame(0).to_vec(), [3, height, width])?).map(Some)
        }
    }
}
