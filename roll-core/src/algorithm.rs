//! A training algorithm.

use crate::{
    Environment, Error, Evaluated, EvaluationContext, Headline, Model, Noise, Progress, Result, RewardScorer, Sample,
    StateDict, StepContext, StepReport, Validation,
};

/// Where the samples of a step come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataSource {
    /// The rows of the configuration's section `data`.
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

    /// The reason why a row without a clip cannot be trained on, or evaluated, as the end of "... needs a clip: "; `None`
    /// if it can. `has_image`: whether the row has a picture of its own. `reference_reader`: the name of a reward that
    /// reads its reference ([`RewardScorer::reads_reference`]), if one does. Called before the model is opened, and only
    /// with [`DataSource::Clips`].
    fn needs_clip(&self, _has_image: bool, _reference_reader: Option<&str>) -> Option<String> {
        Some("it trains on the clips".into())
    }

    /// Takes the environments that the agent acts in; called once, before [`Algorithm::check`], when the configuration
    /// names one. `make` makes one more each time it is called.
    fn open_environments(&mut self, _make: &mut dyn FnMut() -> Result<Box<dyn Environment>>) -> Result<()> {
        Err(Error::config("env", "this algorithm acts in no environment; leave the section out"))
    }

    /// Its headline metrics, the most important one first; the others are logged too.
    fn headlines(&self) -> Vec<Headline> {
        Vec::new()
    }

    /// One optimizer update.
    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport>;

    /// Generates for samples and scores the results, as training would but without gradient. `None`: this algorithm
    /// has no evaluation on clips.
    fn evaluate(&mut self, _context: &mut EvaluationContext<'_>) -> Result<Option<Vec<Evaluated>>> {
        Ok(None)
    }

    /// Takes clips that are not trained on, this rank's part of them, for [`Algorithm::validate`]; called once, before
    /// the first step. Returns false if the algorithm does not use them; the trainer then generates and scores videos for
    /// these clips ([`Algorithm::evaluate`]).
    fn hold_out(&mut self, _clips: &[Sample]) -> bool {
        false
    }

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
