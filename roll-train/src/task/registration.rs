//! Registration of tasks: a crate that has one submits its [`TaskType`].

use roll_core::{ClipAlgorithm, Error, Grad, OwnDataAlgorithm, Result, inventory};

use super::{Network, OpenedAlgorithm, Opening, Task};
use crate::config::RunConfig;
use crate::findings::{Findings, Listing};
use crate::rewards::TrainedReward;

/// A kind of task, by the origin of its samples. A crate submits it with `inventory::submit!`, and every program that
/// links the crate has it.
pub enum TaskType {
    /// A task of rows of clips and prompts.
    Clips(OpenTask<dyn ClipAlgorithm>),
    /// A task of algorithms that bring their own data.
    Own(OpenTask<dyn OwnDataAlgorithm>),
}

/// The functions that open a task of algorithms of the trait `A`.
pub struct OpenTask<A: ?Sized + 'static> {
    /// Opens the parts of a run and its network, in the order in which mistakes are cheap to find. Returns `None` in
    /// place of parts or network after a problem that prevents their use.
    pub open: fn(
        &Opening<'_>,
        OpenedAlgorithm<A>,
        Option<TrainedReward>,
        &mut Findings,
    ) -> (Option<Box<dyn OpenedTask>>, Option<Network>),
    /// Checks the sections of this kind of task in a run whose algorithm cannot be made.
    pub check_sections: fn(&Opening<'_>, Option<&mut Network>, &mut Findings),
}

inventory::collect!(TaskType);

impl TaskType {
    /// The tasks of this program.
    pub(crate) fn all() -> impl Iterator<Item = &'static Self> {
        inventory::iter::<Self>.into_iter()
    }

    /// The task of the algorithm `name` on rows.
    pub(crate) fn of_clips(name: &str) -> Result<&'static OpenTask<dyn ClipAlgorithm>> {
        let task = Self::all().find_map(|task| match task {
            Self::Clips(task) => Some(task),
            Self::Own(_) => None,
        });
        task.ok_or_else(|| no_task(name, "the rows of `data.metadata`"))
    }

    /// The task of the algorithm `name` on its own data.
    pub(crate) fn of_own_data(name: &str) -> Result<&'static OpenTask<dyn OwnDataAlgorithm>> {
        let task = Self::all().find_map(|task| match task {
            Self::Own(task) => Some(task),
            Self::Clips(_) => None,
        });
        task.ok_or_else(|| no_task(name, "data of its own"))
    }

    /// As [`OpenTask::check_sections`].
    pub(crate) fn check_sections(&self, opening: &Opening<'_>, network: Option<&mut Network>, found: &mut Findings) {
        match self {
            Self::Clips(task) => (task.check_sections)(opening, network, found),
            Self::Own(task) => (task.check_sections)(opening, network, found),
        }
    }
}

/// The error for an algorithm whose kind of task is not linked.
fn no_task(algorithm: &str, samples: &str) -> Error {
    Error::Unsupported(format!(
        "`{algorithm}` trains on {samples}, and no crate of this program has a task for that: link one, such as `use \
         roll_video as _;` for rows"
    ))
}

/// The parts of a task, opened as far as they can be.
pub trait OpenedTask: Send {
    /// The number of optimizer steps; `None` after a problem.
    fn steps(&self) -> Option<u64>;

    /// The task of a run; `None` if a part could not be opened.
    fn into_task(self: Box<Self>) -> Option<Box<dyn Task>>;

    /// Looks closer at data, rewards and evaluated samples than a run does before its first step, for `roll check`. At
    /// most `max_references` samples are prepared as references of the reward. `grad` says whether the run
    /// differentiates the reward. Returns height and width of the largest video that is trained on, if there are any.
    fn look(
        &mut self,
        config: &RunConfig,
        max_references: usize,
        grad: Grad,
        found: &mut Listing,
    ) -> Option<[usize; 2]>;
}
