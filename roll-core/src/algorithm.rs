//! A training algorithm.

use crate::{
    Environment, Error, Evaluated, EvaluationContext, Headline, Model, Noise, Progress, Result, RewardScorer, Sample,
    StateDict, StepContext, StepReport, Validation,
};

/// An algorithm, by where the samples of its steps come from.
pub enum Samples {
    /// The rows of the configuration's section `data`.
    Clips(Box<dyn ClipAlgorithm>),
    /// Samples that the algorithm brings or makes itself. [`StepContext::samples`] is empty.
    Own(Box<dyn OwnDataAlgorithm>),
}

/// A training algorithm. It is a [`ClipAlgorithm`] or an [`OwnDataAlgorithm`], too, as [`Algorithm::samples`] says.
pub trait Algorithm: Send {
    /// Wraps the algorithm in the source of its samples: `Samples::Clips(self)` or `Samples::Own(self)`. Called once,
    /// before everything else.
    fn samples(self: Box<Self>) -> Samples;

    /// Checks model and reward once, before the first step.
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()>;

    /// Its headline metrics, the most important one first. Metrics that are no headlines are logged, too.
    fn headlines(&self) -> Vec<Headline> {
        Vec::new()
    }

    /// One optimizer update.
    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport>;

    /// Runs the model on tasks that training never sees, without training it. `None`: this algorithm has no validation.
    fn validate(
        &mut self,
        _step: u64,
        _model: &mut dyn Model,
        _noise: &Noise,
        _progress: &dyn Progress,
    ) -> Result<Option<Validation>> {
        Ok(None)
    }

    /// State that a resume needs beyond parameters and optimizer, as JSON. Called on all ranks at the same time; the
    /// state of rank 0 is saved.
    fn state(&self) -> serde_json::Value {
        serde_json::Value::Null
    }

    /// Restores [`Algorithm::state`].
    fn load_state(&mut self, _state: &serde_json::Value) -> Result<()> {
        Ok(())
    }

    /// Tensors that a resume needs beyond parameters and optimizer, by name: an older policy, an average. They are
    /// whole and the same on every rank; the tensors of rank 0 are saved with each checkpoint. Empty if there are no
    /// such tensors.
    ///
    /// Called after [`Algorithm::state`]. Names, shapes and dtypes must depend on that state, the options and the model
    /// alone: a run is not resumed from a checkpoint whose tensors differ in them.
    fn tensors(&self) -> Result<StateDict> {
        Ok(StateDict::new())
    }

    /// Restores [`Algorithm::tensors`], after [`Algorithm::load_state`] and after parameters and optimizer. `tensors`
    /// have the names, shapes and dtypes that [`Algorithm::tensors`] returns. Not called if there are no tensors.
    fn load_tensors(&mut self, _tensors: &StateDict) -> Result<()> {
        Err(Error::Misuse("this algorithm gives tensors to save and does not take them back".into()))
    }
}

/// An algorithm on the rows of `data.metadata`: on their clips, or on their prompts and pictures.
pub trait ClipAlgorithm: Algorithm {
    /// The use of the clips of rows; by default it trains on them. Called before the model is opened.
    fn clip_use(&self) -> ClipUse {
        ClipUse::default()
    }

    /// Generates for samples and scores the results, as training would but without gradient. `None`: this algorithm
    /// has no evaluation on clips.
    fn evaluate(&mut self, _context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        Ok(None)
    }

    /// Takes this rank's part of the clips that are not trained on, for [`Algorithm::validate`]. Called once, before
    /// the first step. Returns false if the algorithm does not use them. In that case, the trainer generates and scores
    /// videos for these clips ([`ClipAlgorithm::evaluate`]).
    fn hold_out(&mut self, _clips: &[Sample]) -> bool {
        false
    }
}

/// The use that an algorithm has for the clips of rows.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ClipUse {
    /// Why the algorithm needs a clip in every row, whatever the rewards: "it trains on the clips". `None`: it needs
    /// none.
    pub why_needed: Option<String>,
    /// The part of a row that rewards compare its videos with.
    pub reference: Reference,
}

impl Default for ClipUse {
    fn default() -> Self {
        Self { why_needed: Some("it trains on the clips".into()), reference: Reference::Clip }
    }
}

/// The video or picture that the reward compares the generated video with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// All frames of the sample's clip, as in the reference implementation. A row without a clip has no reference.
    Clip,
    /// The first frame of the clip.
    FirstFrame,
    /// The sample's picture, or the clip's first frame for a sample without a picture.
    Image,
}

/// An algorithm that brings or makes its own samples: conversations, episodes of an agent.
pub trait OwnDataAlgorithm: Algorithm {
    /// Steps of one pass over its data. `None`: the data have no end.
    fn steps_per_epoch(&self) -> Option<u64> {
        None
    }

    /// Takes the environments that the agent acts in; called once, before [`Algorithm::check`], when the configuration
    /// names one. `make` makes one more each time it is called.
    fn open_environments(&mut self, _make: &mut dyn FnMut() -> Result<Box<dyn Environment>>) -> Result<()> {
        Err(acts_in_no_environment())
    }
}

/// The error of an algorithm that has no use for the section `env`.
pub fn acts_in_no_environment() -> Error {
    Error::config("env", "this algorithm acts in no environment; leave the section out")
}
