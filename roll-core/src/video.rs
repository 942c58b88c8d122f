//! Videos and training samples.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, Tensor};

/// Columns of a row of the data that `roll` itself does not read, by name: an answer, a category, a list of objects.
pub type Columns = Arc<BTreeMap<String, serde_json::Value>>;

/// Frames in RGB, f32 `[T, 3, H, W]`, values in [-1, 1].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "UncheckedVideo")]
pub struct Video {
    frames: Tensor,
    #[serde(with = "crate::number")]
    fps: f64,
}

/// The fields of a [`Video`] as they are deserialized, before they are checked.
#[derive(Deserialize)]
struct UncheckedVideo {
    frames: Tensor,
    #[serde(with = "crate::number")]
    fps: f64,
}

impl TryFrom<UncheckedVideo> for Video {
    type Error = Error;
    fn try_from(UncheckedVideo { frames, fps }: UncheckedVideo) -> Result<Self> {
        Self::new(frames, fps)
    }
}

impl Video {
    /// Creates a video of `fps` frames per second. Fails unless `frames` is f32 `[T, 3, H, W]`.
    pub fn new(frames: Tensor, fps: f64) -> Result<Self> {
        match (frames.shape(), frames.f32s()) {
            ([_, 3, _, _], Ok(_)) => Ok(Self { frames, fps }),
            (shape, Ok(_)) => Err(Error::shape("video", "[T, 3, H, W]", shape)),
            (_, Err(e)) => Err(e),
        }
    }

    /// The frames: f32 `[T, 3, H, W]` in [-1, 1].
    pub fn frames(&self) -> &Tensor {
        &self.frames
    }

    /// Frames per second.
    pub fn fps(&self) -> f64 {
        self.fps
    }

    /// Number of frames, height and width: `[T, H, W]`.
    pub fn dims(&self) -> [usize; 3] {
        let shape = self.frames.shape(); // `[T, 3, H, W]`, checked in `new`
        [shape[0], shape[2], shape[3]]
    }

    /// One frame, `[3, H, W]`, as a slice.
    pub fn frame(&self, t: usize) -> &[f32] {
        let [_, h, w] = self.dims();
        let values = self.frames.f32s().unwrap_or(&[]); // checked in `new`
        &values[t * 3 * h * w..(t + 1) * 3 * h * w]
    }

    /// Iterates over the frames. Each item holds the red, green and blue plane of a frame: `H * W` values in [-1, 1],
    /// row by row.
    ///
    /// ```
    /// use roll_core::{Tensor, Video};
    ///
    /// # fn main() -> roll_core::Result<()> {
    /// let video = Video::new(Tensor::full([2, 3, 4, 5], 0.5), 8.0)?; // two frames of 4 x 5 pixels
    /// for [red, green, blue] in video.planes() {
    ///     assert!(red.len() == 20 && red[0] == green[19] && blue[7] == 0.5);
    /// }
    /// assert_eq!(video.planes().flatten().count(), 6);
    /// # Ok(())
    /// # }
    /// ```
    pub fn planes(&self) -> impl ExactSizeIterator<Item = [&[f32]; 3]> {
        (0..self.dims()[0]).map(|t| {
            let frame = self.frame(t);
            let (red, rest) = frame.split_at(frame.len() / 3);
            let (green, blue) = rest.split_at(red.len());
            [red, green, blue]
        })
    }
}

/// The heights, widths and numbers of frames that a model's videos can have. All fields are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VideoUnit {
    /// Heights are multiples of this.
    pub height: usize,
    /// Widths are multiples of this.
    pub width: usize,
    /// Numbers of frames are one more than a multiple of this, because a causal video encoder takes the first frame
    /// alone.
    pub frames: usize,
    /// The most frames of a video; 1 for a model of pictures.
    pub most_frames: Option<usize>,
}

impl Default for VideoUnit {
    /// The unit of most Wan models: a VAE of stride 4 x 8 x 8, and patches of 2 x 2.
    fn default() -> Self {
        Self { height: 16, width: 16, frames: 4, most_frames: None }
    }
}

impl VideoUnit {
    /// The largest possible number of frames of at most `available`; 0 if none is available.
    pub fn frames_within(&self, available: usize) -> usize {
        match self.most_frames.map_or(available, |most| available.min(most)) {
            0 => 0,
            n => (n - 1) / self.frames * self.frames + 1,
        }
    }

    /// The possible numbers of frames in words, as the end of "the model takes ...".
    pub fn possible_frames(&self) -> String {
        match self.most_frames {
            Some(1) => "pictures, which are videos of one frame".into(),
            Some(most) => format!("one more than a multiple of {} frames, at most {most}", self.frames),
            None => format!("one more than a multiple of {} frames", self.frames),
        }
    }

    /// The largest possible height and width of at most these; a side is 0 if it is smaller than the unit.
    pub fn size_within(&self, [height, width]: [usize; 2]) -> [usize; 2] {
        [height / self.height * self.height, width / self.width * self.width]
    }

    /// Whether a video may have this height and width.
    pub fn has_size(&self, size: [usize; 2]) -> bool {
        size.iter().all(|side| *side > 0) && self.size_within(size) == size
    }
}

/// The video of a row: a clip, or the shape of the video to generate for a row without one.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleVideo {
    /// The clip, already resized and cropped.
    Clip(#[serde(with = "crate::carried::shared")] Arc<Video>),
    /// Number of frames, height and width of the video to generate: `[T, H, W]`.
    Shape([usize; 3]),
}

impl SampleVideo {
    /// Number of frames, height and width: `[T, H, W]`.
    pub fn dims(&self) -> [usize; 3] {
        match self {
            Self::Clip(clip) => clip.dims(),
            Self::Shape(dims) => *dims,
        }
    }

    /// The clip, if there is one.
    pub fn clip(&self) -> Option<&Arc<Video>> {
        match self {
            Self::Clip(clip) => Some(clip),
            Self::Shape(_) => None,
        }
    }
}

/// One row of the training data: a prompt, and a clip, a picture, both or neither.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Position in the data set, stable over epochs and ranks: part of the key of this sample's noise.
    pub index: u64,
    /// File and row that the sample comes from, for messages.
    pub origin: String,
    /// Text prompt.
    pub prompt: String,
    /// The clip, or the shape of the video to generate.
    pub video: SampleVideo,
    /// A reference picture, `[3, H, W]` in [-1, 1], if the row has one; otherwise the clip's first frame is used.
    pub image: Option<Tensor>,
    /// A picture for the last frame, `[3, H, W]` in [-1, 1], if the row has one.
    pub end_image: Option<Tensor>,
    /// The clip's file.
    #[serde(default, with = "crate::carried::path")]
    pub path: Option<PathBuf>,
    /// Factor of the sample's loss, above 0 and usually 1. Metrics do not include it.
    #[serde(default = "one", with = "crate::number")]
    pub weight: f64,
    /// The weight of each pixel of the clip in a loss on the clip itself, from 0 to 1: `[T, H, W]`, or `[1, H, W]` for
    /// all frames. `None`: all pixels have the same weight.
    pub mask: Option<Tensor>,
    /// The other columns of the row, by name, for rewards ([`crate::Target::columns`]).
    #[serde(default, with = "crate::carried::shared")]
    pub columns: Columns,
}

/// For `#[serde(default)]`: the usual weight.
fn one() -> f64 {
    1.0
}

impl Sample {
    /// A row with a prompt and a clip, or with the shape of a video to generate. It has no pictures, mask or columns,
    /// and the weight 1.
    pub fn new(index: u64, origin: impl Into<String>, prompt: impl Into<String>, video: SampleVideo) -> Self {
        Self {
            index,
            origin: origin.into(),
            prompt: prompt.into(),
            video,
            image: None,
            end_image: None,
            path: None,
            weight: 1.0,
            mask: None,
            columns: Columns::default(),
        }
    }

    /// The clip. Fails for a row without one.
    pub fn clip(&self) -> Result<&Arc<Video>> {
        let missing = || Error::Unsupported(format!("{} has no clip, and one is needed here", self.origin));
        self.video.clip().ok_or_else(missing)
    }

    /// The reference picture, `[3, H, W]`: the row's own, or the clip's first frame; `None` for a row with neither.
    pub fn reference_image(&self) -> Result<Option<Tensor>> {
        match (&self.image, &self.video) {
            (Some(image), _) => Ok(Some(image.clone())),
            (None, SampleVideo::Clip(clip)) => {
                let [_, h, w] = clip.dims();
                Tensor::new(clip.frame(0).to_vec(), [3, h, w]).map(Some)
            }
            (None, SampleVideo::Shape(_)) => Ok(None),
        }
    }
}
