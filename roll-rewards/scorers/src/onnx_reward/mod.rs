//! The reward `onnx`: scores frames by any network in an ONNX file, without code.
//!
//! `picture_model.rs` adapts a model to pictures, [`row_score`] maps outputs to numbers, and [`config`] has the
//! options. `picture/frame_scorer.rs` passes the frames through the network.

pub mod config;
mod picture_model;
pub mod row_score;
#[cfg(test)]
mod tests;

use roll_core::{
    BuildContext, Error, Fault, Grad, Measure, OnMissing, Pullback, Result, RewardScorer, Score, Target, Tensor, Video,
};
use roll_external::Fingerprint;
use roll_onnx::{Model, OnnxError};

use crate::RewardError;
use crate::picture::FrameScorer;
pub use config::{Measurement, OnnxConfig};
pub use picture_model::PictureModel;

const NAME: &str = "onnx";
/// Name of the target's tensor with the outputs for the reference's frames, f32 `[N, width]`.
const OUTPUTS: &str = "outputs";

/// The network's output for each scored frame as a number, reduced over the frames by mean, minimum or last frame.
///
/// The gradient passes through the network and the preparation of its input. A network that the executor does not
/// support is an error when the reward is set up; the error names file, node and operator.
#[derive(Debug)]
pub struct OnnxReward {
    config: OnnxConfig,
    model: PictureModel,
}

impl OnnxReward {
    /// Opens the file of `config` at `path`, with weights on `device`.
    pub fn open(mut config: OnnxConfig, path: &std::path::Path, device: &burn_tensor::Device) -> Result<Self> {
        config.check()?;
        let mut model = Model::open(path, device)?;
        if let Some(output) = &config.output {
            model = model.with_output(output)?;
        }
        let model = PictureModel::new(model, &mut config.input)?;
        let width = model.try_out(&config.input)?;
        let reward = Self { config, model };
        if let Some(width) = width {
            reward.check_width(width)?;
        }
        Ok(reward)
    }

    /// The pass of a video's frames through the network.
    fn scorer(&self) -> FrameScorer<'_> {
        FrameScorer {
            network: &self.model,
            input: &self.config.input,
            frames: self.config.frames,
            over: self.config.over_frames,
            batch: self.config.frames_per_batch,
        }
    }

    /// The outputs that `cosine` and `distance` compare with.
    fn compared_outputs(&self, target: &Target) -> Result<Vec<Vec<f32>>> {
        if let Some(vector) = &self.config.vector {
            return Ok(vec![vector.clone()]);
        }
        let bad_target = || RewardError::InvalidTarget { reward: NAME.into(), tensor: OUTPUTS.into() };
        let outputs = target.tensors.get(OUTPUTS).ok_or_else(bad_target)?;
        match *outputs.shape() {
            [_, width] if width > 0 => Ok(outputs.f32s()?.chunks_exact(width).map(<[f32]>::to_vec).collect()),
            _ => Err(bad_target().into()),
        }
    }

    /// Fails if the score cannot be computed from outputs of `width` numbers.
    fn check_width(&self, width: usize) -> Result<()> {
        match (self.config.score, &self.config.vector) {
            (Measurement::Value | Measurement::Sigmoid | Measurement::Softmax, _) => self.index(width).map(drop),
            (Measurement::Cosine | Measurement::Distance, Some(vector)) => {
                self.check_comparable(&vec![0.0; width], vector)
            }
            (Measurement::Cosine | Measurement::Distance, None) => Ok(()),
        }
    }

    /// The index into a row of `width` elements. Fails if it is missing or out of range.
    fn index(&self, width: usize) -> Result<usize> {
        let problem = match self.config.index {
            Some(index) if index < width => return Ok(index),
            Some(index) => format!("expected a place below {width}, the numbers of an output, found {index}"),
            None if width == 1 => return Ok(0),
            None => format!(
                "missing: which of the {width} numbers of an output, counted from 0 (`reward.score: cosine` compares \
                 all of them with those of the reference)"
            ),
        };
        Err(Error::config("reward.index", format!("{problem}; of {}", self.model.path().display())))
    }

    /// Fails unless both rows have the same number of elements.
    fn check_comparable(&self, row: &[f32], other: &[f32]) -> Result<()> {
        if row.len() != other.len() {
            let problem = format!("an output has {} numbers, what it is compared with {}", row.len(), other.len());
            let path = self.model.path().into();
            return Err(Error::component(Fault::User, OnnxError::BadFile { path, problem }));
        }
        Ok(())
    }
}

impl RewardScorer for OnnxReward {
    fn name(&self) -> &str {
        NAME
    }

    fn measures(&self) -> Measure {
        Measure::new(self.config.label.clone())
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn reads_reference(&self) -> bool {
        self.config.score.needs_comparison() && self.config.vector.is_none()
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        if !self.reads_reference() {
            return Ok(Target::default());
        }
        let rows = self.scorer().rows(reference)?;
        let Some(width) = rows.first().map(Vec::len) else {
            return Err(Error::nothing_to_score("the reference has no frames"));
        };
        let outputs = Tensor::new(rows.concat(), [rows.len(), width])?;
        Ok(Target::of([(OUTPUTS.to_string(), outputs)].into()))
    }

    fn score(&mut self, video: &Video, _: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let scorer = self.scorer();
        match self.config.score {
            Measurement::Value => {
                scorer.score(video, &|row: &[f32]| Ok(row_score::value(row, self.index(row.len())?)), grad)
            }
            Measurement::Sigmoid => {
                scorer.score(video, &|row: &[f32]| Ok(row_score::sigmoid(row, self.index(row.len())?)), grad)
            }
            Measurement::Softmax => {
                scorer.score(video, &|row: &[f32]| Ok(row_score::softmax(row, self.index(row.len())?)), grad)
            }
            Measurement::Cosine => {
                let direction = row_score::mean_direction(&self.compared_outputs(target)?);
                let score_of_row = |row: &[f32]| {
                    self.check_comparable(row, &direction)?;
                    Ok(row_score::cosine(row, &direction))
                };
                scorer.score(video, &score_of_row, grad)
            }
            Measurement::Distance => {
                let compared_outputs = self.compared_outputs(target)?;
                let score_of_row = |row: &[f32]| {
                    compared_outputs.iter().try_for_each(|other| self.check_comparable(row, other))?;
                    Ok(row_score::distance(row, &compared_outputs))
                };
                scorer.score(video, &score_of_row, grad)
            }
        }
    }

    fn target_key(&self) -> Result<Option<String>> {
        let config = OnnxConfig { file: String::new(), ..self.config.clone() };
        let settings =
            serde_json::to_string(&config).map_err(|e| Error::Misuse(format!("options of a reward as JSON: {e}")))?;
        Ok(Some(Fingerprint::new(NAME).text("settings", settings).file(self.model.path())?.finish()))
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

/// Builds the reward from its options.
fn build(config: OnnxConfig, context: &BuildContext) -> Result<OnnxReward> {
    config.check()?;
    let path = context.resolve(&config.file);
    OnnxReward::open(config, &path, &roll_backends::device(&context.backend)?)
}

roll_core::register! {
    Reward, NAME, OnnxConfig,
    "Output of an ONNX network on the frames: a value, a class, likeness to the reference",
    build,
}
