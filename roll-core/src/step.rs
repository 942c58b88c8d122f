//! One step of training: its inputs and its report.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Model, Noise, Progress, RewardScorer, Sample, Strategy, Video};

/// Everything one step works with; all of it is borrowed.
pub struct StepContext<'a> {
    /// Number of the step, from 0.
    pub step: u64,
    /// The samples of this rank for this step: all micro-batches of one optimizer update.
    pub samples: &'a [Sample],
    /// The model under training.
    pub model: &'a mut dyn Model,
    /// The reward. Several rewards of a configuration are one, their weighted sum.
    pub reward: Option<&'a mut dyn RewardScorer>,
    /// Optimizer and ranks.
    pub strategy: &'a mut dyn Strategy,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Source of every random draw.
    pub noise: &'a Noise,
    /// Receives progress inside a long step.
    pub progress: &'a dyn Progress,
    /// Whether the caller wants [`StepReport::videos`].
    pub want_videos: bool,
}

impl StepContext<'_> {
    /// The context of the same step with these samples and this reward.
    pub fn with<'b>(
        &'b mut self,
        samples: &'b [Sample],
        reward: Option<&'b mut (dyn RewardScorer + 'static)>,
    ) -> StepContext<'b> {
        StepContext {
            step: self.step,
            samples,
            model: &mut *self.model,
            reward: reward.map(|reward| reward as &mut dyn RewardScorer),
            strategy: &mut *self.strategy,
            learning_rate: self.learning_rate,
            noise: self.noise,
            progress: self.progress,
            want_videos: self.want_videos,
        }
    }
}

/// The outcome of one step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepReport {
    /// Metrics by name, in the names of the reference: `actor/loss`, `time/decode` (seconds).
    #[serde(default, with = "crate::number")]
    pub metrics: BTreeMap<String, f64>,
    /// Samples left out: origin ([`Sample::origin`]) and reason.
    #[serde(default)]
    pub skipped: Vec<(String, String)>,
    /// Generated videos: name and video.
    #[serde(default)]
    pub videos: Vec<(String, Video)>,
    /// Lines for `trajectories.jsonl`: the observations and answers of an agent, as JSON objects that a person can
    /// read.
    #[serde(default)]
    pub records: Vec<serde_json::Value>,
    /// False when a non-finite value left the parameters as they were.
    pub applied: bool,
}
