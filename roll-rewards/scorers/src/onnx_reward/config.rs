//! Options of the reward `onnx`.

use roll_core::keys::check_ranges;
use roll_core::{Error, OnMissing, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::picture::{Frames, Input, OverFrames, check_on_missing};

/// Options of the reward `onnx`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OnnxConfig {
    /// The ONNX file, with one input for pictures or a video.
    #[schemars(extend("x-required" = true))]
    pub file: String,
    /// Which frames are scored.
    pub frames: Frames,
    /// How frames become the network's input.
    pub input: Input,
    /// Name of the output that is read. If absent, the first output.
    pub output: Option<String>,
    /// How the output for a frame becomes a score: `value`, `softmax`, `sigmoid`, `cosine` or `distance`.
    pub score: Measurement,
    /// Index into the output, for `value`, `softmax` and `sigmoid`.
    pub index: Option<usize>,
    /// The vector that `cosine` and `distance` compare with. If absent, the outputs for the frames of the reference
    /// video.
    pub vector: Option<Vec<f32>>,
    /// How the scores of the frames are reduced to one.
    pub over_frames: OverFrames,
    /// Number of frames per batch of the network.
    #[schemars(range(min = 1))]
    pub frames_per_batch: usize,
    /// Name of the measured quantity, for labels, file names and metrics.
    pub label: String,
    /// Handling of a video that has no frame to score.
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

/// How the output for a frame becomes a score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Measurement {
    /// The output's only element, or element `index`.
    #[default]
    Value,
    /// The softmax probability of class `index`.
    Softmax,
    /// The sigmoid of the only element, or of element `index`.
    Sigmoid,
    /// The mean cosine similarity to the outputs for the reference's frames, or to `vector`.
    Cosine,
    /// Minus the root mean square difference from `vector`, or minus the mean of these differences from the outputs for
    /// the reference's frames.
    Distance,
}

impl Measurement {
    /// Whether the score is a comparison with the reference or a vector.
    pub fn needs_comparison(self) -> bool {
        matches!(self, Self::Cosine | Self::Distance)
    }
}

impl OnnxConfig {
    /// Fails, and names the key, if a value is outside its range or has no effect.
    pub fn check(&self) -> Result<()> {
        let invalid = |key: &str, problem: &str| Err(Error::config(format!("reward.{key}"), problem));
        if self.file.is_empty() {
            return invalid("file", "missing: the ONNX file");
        }
        self.frames.check()?;
        self.input.check("reward.input")?;
        check_ranges("reward", self)?;
        check_on_missing(self.on_missing)?;
        if self.score == Measurement::Softmax && self.index.is_none() {
            return invalid("index", "missing: which class, counted from 0, since `score` is softmax");
        }
        if self.score.needs_comparison() && self.index.is_some() {
            return invalid("index", "`score: cosine` and `distance` compare whole outputs: leave it out");
        }
        if let Some(vector) = &self.vector {
            if !self.score.needs_comparison() {
                return invalid("vector", "goes with `score: cosine` or `distance`");
            }
            if vector.is_empty() || vector.iter().any(|v| !v.is_finite()) {
                return invalid("vector", "expected finite numbers");
            }
        }
        Ok(())
    }
}
