//! A training algorithm.

use std::collections::BTreeMap;

use crate::{Environment, Error, Model, Noise, Result, RewardScorer, Sample, Strategy, Video};

/// Everything one step works with. The algorithm owns none of it.
pub struct StepContext<'a> {
    /// From 0.
    pub step: u64,
    /// The samples of this rank for this step: all micro-batches of one optimizer update.
    pub samples: &'a [Sample],
    /// The model under training.
    pub model: &'a mut dyn Model,
    /// The reward; several are one weighted sum.
    pub reward: Option<&'a mut dyn RewardScorer>,
    /// Optimizer and ranks.
    pub strategy: &'a mut dyn Strategy,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Source of every random draw.
    pub noise: &'a Noise,
    /// Told what goes on inside a long step.
    pub progress: &'a dyn Progress,
    /// Whether the caller wants [`StepReport::videos`].
    pub want_videos: bool,
}

/// Told what goes on inside a long step.
pub trait Progress: Sync {
    /// `phase` has begun: "denoising step 3 of 8".
    fn phase(&self, phase: &str);
    /// Whether the user asked to stop; a step may then return [`crate::Error::Interrupted`] before it changes anything.
    fn interrupted(&self) -> bool {
        false
    }
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;
impl Progress for Silent {
    fn phase(&self, _phase: &str) {}
}

/// What one step did.
#[derive(Clone, Debug, Default)]
pub struct StepReport {
    /// Metrics by name, in the names of the reference: `actor/loss`, `time/decode` (seconds).
    pub metrics: BTreeMap<String, f64>,
    /// Samples left out, with the reason.
    pub skipped: Vec<(String, String)>,
    /// Generated videos by name.
    pub videos: Vec<(String, Video)>,
    /// Lines for `trajectories.jsonl`: what an agent saw and did, as JSON objects that a person can read.
    pub records: Vec<serde_json::Value>,
    /// False when a non-finite value left the parameters as they were.
    pub applied: bool,
}

/// What an evaluation works with: nothing is trained.
pub struct EvaluationContext<'a> {
    /// What is generated for; each sample gets the same noise at every evaluation of a run.
    pub samples: &'a [Sample],
    /// The model.
    pub model: &'a mut dyn Model,
    /// What each result is scored with, in order: the reward of the run first, then those that are only measured.
    pub rewards: Vec<&'a mut dyn RewardScorer>,
    /// Source of every random draw.
    pub noise: &'a Noise,
    /// Told what goes on.
    pub progress: &'a dyn Progress,
}

/// What the model made of one sample.
#[derive(Clone, Debug)]
pub struct Evaluated {
    /// The sample's [`Sample::origin`].
    pub origin: String,
    /// One per reward of the context; `None` where it found nothing to score.
    pub scores: Vec<Option<f64>>,
    /// Divergence from the model without its adapter.
    pub kl: f64,
    /// What was generated.
    pub video: Option<Video>,
}

/// How well the model does what it is trained for, on tasks that training never sees.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Validation {
    /// Metrics by name: `val/env/success`.
    pub metrics: BTreeMap<String, f64>,
    /// As [`StepReport::records`].
    pub records: Vec<serde_json::Value>,
}

/// Where the samples of a step come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSource {
    /// The clips of the configuration's section `data`.
    Clips,
    /// The algorithm brings or makes its own: [`StepContext::samples`] is empty.
    Own {
        /// Steps of one pass over it, where it has an end.
        steps_per_epoch: Option<u64>,
    },
}

/// A training algorithm.
pub trait Algorithm: Send {
    /// Checks model and reward once, before the first step.
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()>;

    /// Where its samples come from.
    fn data_source(&self) -> DataSource {
        DataSource::Clips
    }

    /// Takes the environments that the agent acts in; called once, before [`Algorithm::check`], when the configuration
    /// names one. `make` makes one more each time it is called.
    fn open_environments(&mut self, _make: &mut dyn FnMut() -> Result<Box<dyn Environment>>) -> Result<()> {
        Err(Error::config("env", "this algorithm acts in no environment; leave the section out"))
    }

    /// One optimizer update.
    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport>;

    /// Generates for samples and scores the results, as training would but without gradient. `None`: this algorithm
    /// has no such notion.
    fn evaluate(&mut self, _context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        Ok(None)
    }

    /// Lets the model do what it is trained for, without training it. `None`: this algorithm has no such notion.
    fn validate(
        &mut self,
        _step: u64,
        _model: &mut dyn Model,
        _noise: &Noise,
        _progress: &dyn Progress,
    ) -> Result<Option<Validation>> {
        Ok(None)
    }

    /// What a resume needs beyond parameters and optimizer, as JSON.
    fn state(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// Restores [`Algorithm::state`].
    fn load_state(&mut self, _state: &serde_json::Value) -> Result<()> {
        Ok(())
    }
}
