//! Tasks: the part of a run that knows its samples. A task owns data, algorithm, measurements and their state. The
//! trainer owns steps, strategy, checkpoints and stopping, and knows a task by [`Task`] alone.
//!
//! A crate that has a task submits its [`TaskType`], which opens the parts of a run as an [`OpenedTask`]. A check looks
//! at these parts, and a run makes its task of them. The other items are for tasks to use:
//! - [`Opening`] and [`Network`] open strategy and model.
//! - [`state`] and [`restore`] are an algorithm's part of a checkpoint.
//! - [`PartialResults`] are results on disk that a process which continues a run does not compute again.
//! - [`validate`] runs an algorithm's own validation.

mod algorithm_state;
mod opening;
mod partial;
mod registration;
mod validation;

use std::collections::BTreeMap;
use std::path::PathBuf;

use roll_core::{Communicator, Headline, Model, Noise, Result, StateDict, StepContext, StepReport};

use crate::config::RunConfig;
use crate::progress::{RunSession, StoppableBar};
use crate::results::record::Record;
use crate::results::{Journal, SetLabels};
use crate::run_dir::RunDir;

pub use algorithm_state::{restore, state};
pub use opening::{Network, OpenedAlgorithm, Opening};
pub(crate) use partial::remove_up_to;
pub use partial::{PartialResults, key};
pub use registration::{OpenTask, OpenedTask, TaskType};
pub use validation::validate;

/// The samples that a run trains on, with their algorithm and measurements.
pub trait Task: Send {
    /// The facts of the task, which do not change during a run.
    fn facts(&self) -> &TaskFacts;

    /// Lines of the overview at the start of a run: subject and text. `steps_suffix` is the end of the line on steps,
    /// such as ", 3 done".
    fn overview(&self, config: &RunConfig, steps_suffix: &str) -> Vec<(&'static str, String)>;

    /// Takes one optimizer step. The trainer leaves the samples and the reward of the context to the task.
    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport>;

    /// Measures the model between steps, and returns the metrics. Measurements of this step that the record has already
    /// are not repeated. The model has the averaged parameters meanwhile, if there are any. All ranks must call it.
    fn measure(&mut self, context: &mut TaskContext<'_>) -> Result<BTreeMap<String, f64>>;

    /// The reason to end the run now, after `step` steps, if there is one. It depends on the record alone, so that all
    /// ranks agree, and a run that was killed and resumed ends where it would have ended.
    fn stop_reason(&self, _record: &Record, _step: u64) -> Option<String> {
        None
    }

    /// Completes the measurements after the last step. `is_early` is true if [`Task::stop_reason`] ended the run.
    fn end(&mut self, _context: &mut TaskContext<'_>, _is_early: bool) -> Result<()> {
        Ok(())
    }

    /// Writes the task's own results to the directory of a run that is done. `dir` is `None` on all ranks but 0.
    fn results(&self, _dir: Option<&RunDir>, _record: &Record) -> Result<TaskResults> {
        Ok(TaskResults::default())
    }

    /// State that a resume needs besides parameters and optimizer. All ranks must call it. Only the state of the rank
    /// with `is_writer` is written; other ranks leave out the tensors.
    fn state(&self, is_writer: bool) -> Result<TaskState>;

    /// Restores [`Task::state`], after parameters and optimizer. Fails, and takes no tensor, if names, shapes or dtypes
    /// of the tensors are not those that the task keeps.
    fn restore(&mut self, state: &TaskState) -> Result<()>;
}

/// Facts of a task that do not change during a run.
#[derive(Clone, Debug, Default)]
pub struct TaskFacts {
    /// The number of optimizer steps.
    pub steps: u64,
    /// Samples of a step over all ranks; 0 where the algorithm brings its own data.
    pub samples_per_step: u64,
    /// The metrics to show first.
    pub headlines: Vec<Headline>,
    /// Names of evaluated sets and of their scores.
    pub labels: SetLabels,
    /// Whether [`Task::measure`] measures something.
    pub measures: bool,
    /// Number of steps between measurements; 0: only before the first step and after the last.
    pub measured_every: u64,
    /// A further reason why no parameter may have changed, as the end of a message on it; may be empty.
    pub idle_hint: &'static str,
}

/// The surroundings of a task between steps.
pub struct TaskContext<'a> {
    /// The configuration of the run.
    pub config: &'a RunConfig,
    /// Number of steps done.
    pub step: u64,
    /// The model under training.
    pub model: &'a mut dyn Model,
    /// All ranks.
    pub ranks: &'a dyn Communicator,
    /// Source of every random draw.
    pub noise: &'a Noise,
    /// The record of the run, part of every checkpoint.
    pub record: &'a mut Record,
    /// Writer of the files of the run directory.
    pub journal: &'a mut Journal,
    /// Where progress is shown.
    pub session: &'a RunSession,
    /// The bar of the steps.
    pub bar: &'a StoppableBar,
}

/// Lines of the overview that name the rewards and the environment. The names of the rewards are followed by
/// `reward_suffix`.
pub fn component_lines(config: &RunConfig, reward_suffix: &str) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if !config.reward.is_empty() {
        let rewards: Vec<String> = config.reward.iter().map(|reward| format!("`{}`", reward.name)).collect();
        lines.push(("reward", format!("{}{reward_suffix}", rewards.join(" + "))));
    }
    if let Some(env) = &config.env {
        lines.push(("environment", format!("`{}`", env.name)));
    }
    lines
}

/// State of a task in a checkpoint.
#[derive(Debug, Default)]
pub struct TaskState {
    /// The part of the state that is JSON; `null` if the task has no such state.
    pub json: serde_json::Value,
    /// Tensors by name, such as an older policy.
    pub tensors: StateDict,
    /// The file of the tensors, or the checkpoint that has none, for errors of [`Task::restore`].
    pub origin: PathBuf,
}

/// Results of a task.
#[derive(Debug, Default)]
pub struct TaskResults {
    /// Files and folders for people to open: name and path.
    pub written: Vec<(&'static str, PathBuf)>,
    /// Numbers of encodings that were found in the cache, and that were computed; `None` without a cache.
    pub encodings: Option<[u64; 2]>,
}
