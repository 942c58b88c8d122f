//! Options of the reward `onnx`.

use roll_core::keys::check_ranges;
use roll_core::{Error, OnMissing, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::picture::{Frames, Input, OverFrames, check_common};

/// Options of the reward `onnx`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OnnxConfig {
    /// The ONNX file: one input, of pictures or of a video.
    pub file: String,
    /// Which frames go through the network.
    pub frames: Frames,
    /// How they become its input.
    pub input: Input,
    /// Which output is read; the first unless given.
    pub output: Option<String>,
    /// Reduction of an output to a number.
    pub score: Measurement,
    /// Which number of the output, for `value`, `softmax` and `sigmoid`.
    pub index: Option<usize>,
    /// Vector that `cosine` and `distance` compare with, instead of the reference.
    pub vector: Option<Vec<f32>>,
    /// Reduction of the numbers of frames to one.
    pub over_frames: OverFrames,
    /// Frames that go through the network at once.
    #[schemars(range(min = 1))]
    pub frames_per_batch: usize,
    /// Name of the measured quantity, for labels and pages.
    pub label: String,
    /// Reaction to a video without frames.
    pub on_missing: OnMissing,
}

impl Default for OnnxConfig {
    fn default() -> Self {
        Self {
            file: String::new(),
            frames: Frames::All,
            input: Input::default(),
            output: None,
            score: Measurement::Value,
            index: None,
            vector: None,
            over_frames: OverFrames::Mean,
            frames_per_batch: 8,
            label: "score".into(),
            on_missing: OnMissing::Skip,
        }
    }
}

/// How the output for a frame becomes a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Measurement {
    /// The output's only number, or that of `index`.
    #[default]
    Value,
    /// The share of `index` in the softmax: the probability of a class.
    Softmax,
    /// The sigmoid of the only number, or of that of `index`.
    Sigmoid,
    /// The mean cosine similarity to the outputs for the reference's frames, or to `vector`.
    Cosine,
    /// Minus the mean root mean square difference from the outputs for the reference's frames, or from `vector`.
    Distance,
}

impl Measurement {
    /// Whether it compares with something.
    pub fn compares(self) -> bool {
        matches!(self, Self::Cosine | Self::Distance)
    }
}

impl OnnxConfig {
    /// Fails, naming the key, when a value is out of its range or goes with nothing.
    pub fn check(&self) -> Result<()> {
        let wrong = |key: &str, problem: &str| Err(Error::config(format!("reward.{key}"), problem));
        if self.file.is_empty() {
            return wrong("file", "missing: the ONNX file");
        }
        self.frames.check("reward.frames")?;
        self.input.check("reward.input")?;
        check_ranges("reward", self)?;
        check_common(self.frames_per_batch, self.on_missing)?;
        if self.score == Measurement::Softmax && self.index.is_none() {
            return wrong("index", "missing: which class, counted from 0, since `score` is softmax");
        }
        if self.score.compares() && self.index.is_some() {
            return wrong("index", "`score: cosine` and `distance` compare whole outputs: leave it out");
        }
        if let Some(vector) = &self.vector {
            if !self.score.compares() {
                return wrong("vector", "goes with `score: cosine` or `distance`");
            }
            if vector.is_empty() || vector.iter().any(|v| !v.is_finite()) {
                return wrong("vector", "expected finite numbers");
            }
        }
        Ok(())
    }
}
