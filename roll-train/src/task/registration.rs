//! Registration of tasks: a crate that has one submits its [`TaskType`].

use roll_core::{DataSource, Error, Grad, Result, inventory};

use super::{Network, OpenedAlgorithm, Opening, Task};
use crate::config::RunConfig;
use crate::findings::{Findings, Listing};
use crate::rewards::TrainedReward;

/// A kind of task. It is part of every program in which it is submitted with `inventory::submit!`.
pub struct TaskType {
    /// Whether a run whose algorithm has its samples from there is one of this kind. A program has one task for each
    /// source.
    pub takes: fn(DataSource) -> bool,
    /// Opens the parts of a run and its network, in the order in which mistakes are cheap to find. `None` after a problem
    /// that leaves nothing to look at.
    pub open: fn(
        &Opening<'_>,
        OpenedAlgorithm,
        Option<TrainedReward>,
        &mut Findings,
    ) -> (Option<Box<dyn OpenedTask>>, Option<Network>),
    /// Checks the sections of this kind of task in a run whose algorithm cannot be made.
    pub check_sections: fn(&Opening<'_>, Option<&mut Network>, &mut Findings),
}

inventory::collect!(TaskType);

impl TaskType {
    pub(crate) fn all() -> impl Iterator<Item = &'static Self> {
        inventory::iter::<Self>.into_iter()
    }

    /// The task of runs whose algorithm has its samples from `source`.
    pub(crate) fn of(source: DataSource, algorithm: &str) -> Result<&'static Self> {
        Self::all().find(|task| (task.takes)(source)).ok_or_else(|| {
            let samples = match source {
                DataSource::Clips => "the rows of `data.metadata`",
                DataSource::Own { .. } => "data of its own",
            };
            Error::Unsupported(format!(
                "`{algorithm}` trains on {samples}, and no crate of this program has a task for that: link one, such as \
                 `use roll_video as _;` for rows"
            ))
        })
    }
}

/// The parts of a task, opened as far as they can be.
pub trait OpenedTask: Send {
    /// The number of optimizer steps; `None` after a problem.
    fn steps(&self) -> Option<u64>;

    /// The task of a run; `None` if a part could not be opened.
    fn into_task(self: Box<Self>) -> Option<Box<dyn Task>>;

    /// Looks closer at data, rewards and evaluated samples than a run does before its first step, for `roll check`.
    /// `references`: at most this many samples are prepared as references of the reward. `grad`: whether the run
    /// differentiates the reward. Returns height and width of the largest video that is trained on, if there are any.
    fn look(&mut self, config: &RunConfig, references: usize, grad: Grad, found: &mut Listing) -> Option<[usize; 2]>;
}
