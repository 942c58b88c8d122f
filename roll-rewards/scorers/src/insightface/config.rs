//! Options of the reward `insightface`.

use roll_core::keys::check_ranges;
use roll_core::{Error, OnMissing, Result};
use roll_onnx::Executor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::align::Alignment;
pub use crate::picture::ChannelOrder;
use crate::picture::check_on_missing;

/// Options of the reward `insightface`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct IdentityConfig {
    /// Directory with a face detector (SCRFD or YuNet) and an ArcFace embedder, as ONNX files.
    #[schemars(extend("x-required" = true))]
    pub reward_model_path: String,
    /// File name of the detector, if several files in the directory fit or none is recognised by its name.
    pub detector: Option<String>,
    /// File name of the embedder, if several files in the directory fit or none is recognised by its name or its
    /// shapes.
    pub embedder: Option<String>,
    /// Lowest confidence of a detected face.
    #[schemars(range(min = 0, max = 1))]
    pub det_threshold: f32,
    /// Largest overlap (intersection over union) of two faces. If their boxes overlap by more, the less confident face
    /// is dropped.
    #[schemars(range(min = 0, max = 1))]
    pub nms_iou: f32,
    /// Side in pixels of the detector's square input, into which frames are scaled; a multiple of 32.
    #[schemars(range(min = 32, max = MAX_DET_SIZE))]
    pub det_size: usize,
    /// Divisor of SCRFD's input, (pixel - 127.5) / divisor: 127.5 in ROLL, 128 in InsightFace.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub det_divisor: f32,
    /// Colour around a frame that does not fill the detector's square input: `grey` in ROLL, `black` in InsightFace.
    pub det_padding: Padding,
    /// Order of the embedder's input channels: RGB in InsightFace, BGR in ROLL.
    pub channel_order: ChannelOrder,
    /// How the face is mapped to the embedder's template.
    pub align: Alignment,
    /// What happens with a video without any face.
    pub on_missing: OnMissing,
    /// What happens with a frame without a face.
    pub undetected: Undetected,
    /// Number of frames per batch of the networks. A larger batch is faster on an accelerator and takes more memory.
    #[schemars(range(min = 1))]
    pub frames_per_batch: usize,
    /// Score every n-th frame, and search every n-th frame of the reference for faces.
    #[schemars(range(min = 1))]
    pub sample_every: usize,
    /// Executor of the networks in passes without gradient.
    pub onnx: Executor,
}

impl Default for IdentityConfig {
    fn default() -> Self {
        Self {
            reward_model_path: String::new(),
            detector: None,
            embedder: None,
            det_threshold: 0.5,
            nms_iou: 0.4,
            det_size: 640,
            det_divisor: 127.5,
            det_padding: Padding::Grey,
            channel_order: ChannelOrder::Rgb,
            align: Alignment::Exact,
            on_missing: OnMissing::Skip,
            undetected: Undetected::LeaveOut,
            frames_per_batch: 8,
            sample_every: 1,
            onnx: Executor::Auto,
        }
    }
}

/// What happens with a frame without a face.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Undetected {
    /// The frame does not count.
    LeaveOut,
    /// The face is assumed at the landmarks of the reference's face nearest in time. A model that does not show faces
    /// yet then has a score and a gradient from the first step on.
    ReferenceLandmarks,
}

/// Value of the detector's square input outside the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Padding {
    /// Grey: 0 in [-1, 1].
    Grey,
    /// Black: -1 in [-1, 1].
    Black,
}

impl Padding {
    /// The value of a pixel, in [-1, 1].
    pub fn value(self) -> f32 {
        match self {
            Self::Grey => 0.0,
            Self::Black => -1.0,
        }
    }
}

/// Unit of the detector's input side: the largest stride of its outputs.
const DET_SIZE_UNIT: usize = 32;
/// Largest side of the detector's input. A frame of 4096 pixels takes 200 MB.
const MAX_DET_SIZE: usize = 4096;

impl IdentityConfig {
    /// Fails, and names the key, if a value is outside its range.
    pub fn check(&self) -> Result<()> {
        let invalid = |key: &str, problem: String| Err(Error::config(format!("reward.{key}"), problem));
        if self.reward_model_path.is_empty() {
            let problem = "missing: the directory that holds the face detector and the face embedder (ONNX files)";
            return invalid("reward_model_path", problem.into());
        }
        check_ranges("reward", self)?;
        if !self.det_size.is_multiple_of(DET_SIZE_UNIT) {
            let problem =
                format!("expected a multiple of {DET_SIZE_UNIT} up to {MAX_DET_SIZE}, found {}", self.det_size);
            return invalid("det_size", problem);
        }
        check_on_missing(self.on_missing)
    }
}
