//! Measurements between steps, without training.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Model, Noise, Progress, RewardScorer, Sample, Video};

/// Everything an evaluation works with; nothing is trained.
pub struct EvaluationContext<'a> {
    /// The samples to generate for; each gets the same noise at every evaluation of a run.
    pub samples: &'a [Sample],
    /// The samples of the next calls. The model's parameters stay the same until then, so that work for these samples
    /// may be done together with work for `samples`.
    pub upcoming: &'a [Sample],
    /// The model.
    pub model: &'a mut dyn Model,
    /// The rewards that score each result: first the run's own, then rewards that are only measured.
    pub rewards: Vec<&'a mut dyn RewardScorer>,
    /// Source of every random draw.
    pub noise: &'a Noise,
    /// Receives progress.
    pub progress: &'a dyn Progress,
}

/// The result of one sample.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Evaluated {
    /// The sample's [`Sample::origin`].
    pub origin: String,
    /// One score per reward of the context; `None` if the reward found nothing to score.
    #[serde(with = "crate::number")]
    pub scores: Vec<Option<f64>>,
    /// KL divergence from the reference policy of the algorithm.
    #[serde(with = "crate::number")]
    pub kl: f64,
    /// The generated video.
    pub video: Option<Video>,
}

/// The result of a validation: metrics of tasks that training never sees.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Metrics by name: `val/env/success`.
    #[serde(with = "crate::number")]
    pub metrics: BTreeMap<String, f64>,
    /// As [`crate::StepReport::records`].
    #[serde(default)]
    pub records: Vec<serde_json::Value>,
    /// The loss of each sample, always in the same order, so that two validations can be compared sample by sample.
    /// Empty if the validation's loss is not the mean of losses of samples.
    #[serde(default, with = "crate::number")]
    pub losses: Vec<f64>,
}
