//! The reward `onnx`: any network in an ONNX file, by configuration alone.
//!
//! `graph.rs` adapts a model to pictures, [`reading`] maps outputs to numbers, and [`config`] has the options.

pub mod config;
mod graph;
pub mod reading;
#[cfg(test)]
mod tests;

use roll_core::{
    BuildContext, Error, Factory, Fault, Grad, Measure, OnMissing, Pullback, Registration, Result, RewardScorer, Score,
    Target, Tensor, Video, default_options, parse_options,
};
use roll_external::Fingerprint;

use crate::RewardError;
use crate::onnx::{Model, OnnxError};
use crate::picture::Look;
pub use config::{Measurement, OnnxConfig};
pub use graph::Graph;

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
    graph: Graph,
}

impl OnnxReward {
    /// Opens the file of `config` at `path`, with weights on `device`.
    pub fn open(mut config: OnnxConfig, path: &std::path::Path, device: &burn::tensor::Device) -> Result<Self> {
        config.check()?;
        let mut model = Model::open(path, device)?;
        if let Some(output) = &config.output {
            model = model.with_output(output)?;
        }
        let graph = Graph::new(model, &mut config.input)?;
        Ok(Self { config, graph })
    }

    fn look(&self) -> Look<'_> {
        Look {
            network: &self.graph,
            input: &self.config.input,
            frames: self.config.frames,
            over: self.config.over_frames,
            batch: self.config.frames_per_batch,
        }
    }

    /// The outputs that `cosine` and `distance` compare with.
    fn others(&self, target: &Target) -> Result<Vec<Vec<f32>>> {
        if let Some(vector) = &self.config.vector {
            return Ok(vec![vector.clone()]);
        }
        let strange = || RewardError::StrangeTarget { reward: NAME.into(), tensor: OUTPUTS.into() };
        let outputs = target.tensors.get(OUTPUTS).ok_or_else(strange)?;
        match *outputs.shape() {
            [_, width] if width > 0 => Ok(outputs.f32s()?.chunks_exact(width).map(<[f32]>::to_vec).collect()),
            _ => Err(strange().into()),
        }
    }

    /// The index into a row of `width` elements. Fails if it is missing or out of range.
    fn index(&self, width: usize) -> Result<usize> {
        let problem = match self.config.index {
            Some(index) if index < width => return Ok(index),
            Some(index) => format!("expected a place below {width}, the numbers of an output, found {index}"),
            None if width == 1 => return Ok(0),
            None => format!("missing: which of the {width} numbers of an output, counted from 0"),
        };
        Err(Error::config("reward.index", format!("{problem}; of {}", self.graph.path().display())))
    }

    fn comparable(&self, row: &[f32], other: &[f32]) -> Result<()> {
        match row.len() == other.len() {
            true => Ok(()),
            false => {
                let problem = format!("an output has {} numbers, what it is compared with {}", row.len(), other.len());
                let path = self.graph.path().into();
                Err(Error::component(Fault::User, OnnxError::BadFile { path, problem }))
            }
        }
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

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        if !self.config.score.compares() || self.config.vector.is_some() {
            return Ok(Target::default());
        }
        let rows = self.look().rows(reference)?;
        let Some(width) = rows.first().map(Vec::len) else {
            return Err(Error::nothing_to_score("the reference has no frames"));
        };
        let outputs = Tensor::new(rows.concat(), [rows.len(), width])?;
        Ok(Target { tensors: [(OUTPUTS.to_string(), outputs)].into() })
    }

    fn score(&mut self, video: &Video, _: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let look = self.look();
        match self.config.score {
            Measurement::Value => {
                look.score(video, &|row: &[f32]| Ok(reading::value(row, self.index(row.len())?)), grad)
            }
            Measurement::Sigmoid => {
                look.score(video, &|row: &[f32]| Ok(reading::sigmoid(row, self.index(row.len())?)), grad)
            }
            Measurement::Softmax => {
                look.score(video, &|row: &[f32]| Ok(reading::softmax(row, self.index(row.len())?)), grad)
            }
            Measurement::Cosine => {
                let direction = reading::mean_direction(&self.others(target)?);
                let read = |row: &[f32]| {
                    self.comparable(row, &direction)?;
                    Ok(reading::cosine(row, &direction))
                };
                look.score(video, &read, grad)
            }
            Measurement::Distance => {
                let others = self.others(target)?;
                let read = |row: &[f32]| {
                    others.iter().try_for_each(|other| self.comparable(row, other))?;
                    Ok(reading::distance(row, &others))
                };
                look.score(video, &read, grad)
            }
        }
    }

    fn target_key(&self) -> Result<Option<String>> {
        let config = OnnxConfig { file: String::new(), ..self.config.clone() };
        let settings =
            serde_json::to_string(&config).map_err(|e| Error::Misuse(format!("options of a reward as JSON: {e}")))?;
        Ok(Some(Fingerprint::new(NAME).text("settings", settings).file(self.graph.path())?.finish()))
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

fn build(config: OnnxConfig, context: &BuildContext) -> Result<OnnxReward> {
    config.check()?;
    let path = context.resolve(&config.file);
    OnnxReward::open(config, &path, &roll_backends::device(&context.backend)?)
}

roll_core::inventory::submit! {
    Registration {
        name: NAME,
        summary: "Output of an ONNX network on the frames: a value, a class, likeness to the reference",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<OnnxConfig>,
        keys: roll_core::keys::of::<OnnxConfig>,
        factory: Factory::Reward(|options, context| {
            Ok(Box::new(build(parse_options("reward", options)?, context)?))
        }),
        planner: None,
    }
}
