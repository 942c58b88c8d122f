//! Scores of generated videos, for every algorithm with a reward on videos: the target that a reward compares with, the
//! score or the treatment of a missing one, and evaluations.

mod evaluation;
mod measure;
mod prepared;

use std::sync::Arc;

use roll_core::{DiffusionModel, Result, Sample, SampleVideo, Tensor, Video};

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

/// Frames per second of generated videos if neither the model nor the sample's clip has a rate.
const FPS: f64 = 16.0;

/// The video or picture that the reward compares the generated video with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// All frames of the sample's clip, as in the reference implementation. A row without a clip has no reference.
    Clip,
    /// The first frame of the clip.
    FirstFrame,
    /// The sample's picture, or the clip's first frame for a sample without a picture.
    Image,
}

impl FrameRate {
    /// Frames per second of the video generated for `sample`.
    pub(crate) fn of(self, model: &dyn DiffusionModel, sample: &Sample) -> f64 {
        let model_rate = model.frame_rate();
        let clip_rate = sample.video.clip().map(|clip| clip.fps());
        let rate = match self {
            Self::Model => model_rate.or(clip_rate),
            Self::Clip => clip_rate.or(model_rate),
        };
        rate.unwrap_or(FPS)
    }
}

impl Reference {
    /// See [`roll_core::Algorithm::needs_clip`], for an algorithm that generates its videos and scores them.
    pub(crate) fn needs_clip(self, has_image: bool, reader: Option<&str>) -> Option<String> {
        let name = match self {
            Self::Clip => "clip",
            Self::FirstFrame => "first_frame",
            Self::Image if has_image => return None,
            Self::Image => "image",
        };
        let hint = if has_image { "; `image` compares with the picture of the row" } else { "" };
        reader.map(|reward| format!("the reward `{reward}` compares with it (`algo.reference: {name}`{hint})"))
    }
}

/// The video that the reward compares the sample's result with; `None` for a row without one.
pub fn reference_video(sample: &Sample, reference: Reference) -> Result<Option<Arc<Video>>> {
    let fps = sample.video.clip().map_or(FPS, |clip| clip.fps());
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
