//! Opens everything that a run consists of, from its configuration: for a run ([`open_run`]) or a check
//! ([`open_check`]).

use roll_backends::overlap::OverlappedRanks;
use roll_core::{
    BuildContext, Communicator, Error, Grad, OwnDataAlgorithm, Registry, Result, Samples, acts_in_no_environment,
};

use crate::config::{LoadedConfig, RunConfig};
use crate::findings::{Finding, Findings, Listing};
use crate::rewards::TrainedReward;
use crate::task::{Network, OpenedAlgorithm, OpenedTask, Opening, Task, TaskType};

/// The parts of a run that a check has opened. A part is `None` if the run has none, or after a problem.
pub struct Checked {
    task: Option<Box<dyn OpenedTask>>,
    /// The number of optimizer steps.
    pub steps: Option<u64>,
    /// Bytes of a checkpoint: trained parameters and the optimizer's two moments, in f32, and the averaged parameters.
    pub checkpoint_bytes: Option<u64>,
}

impl Checked {
    /// As [`OpenedTask::look`]. Returns the findings with their sections, and height and width of the largest video.
    pub fn look(
        &mut self,
        config: &RunConfig,
        references: usize,
        grad: Grad,
    ) -> (Vec<(&'static str, Finding)>, Option<[usize; 2]>) {
        let mut listing = Listing::default();
        let largest = self.task.as_mut().and_then(|task| task.look(config, references, grad, &mut listing));
        (listing.found, largest)
    }
}

/// Opens a run, on the ranks of `context`. Fails with the first problem.
pub(crate) fn open_run(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
) -> Result<(Network, Box<dyn Task>)> {
    let mut found = Findings::logged(context.ranks.rank().0 == 0);
    let (opened, network) = open(loaded, registry, context, true, &mut found);
    found.end()?;
    let task = opened.and_then(|opened| opened.into_task());
    network.zip(task).ok_or_else(|| Error::Misuse("a run was opened without one of its parts".into()))
}

/// Opens everything that can be opened, and returns it with the findings and their sections. Without `has_model`,
/// the model and the parts that need it are not opened.
pub(crate) fn open_check(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
    has_model: bool,
) -> Result<(Checked, Vec<(&'static str, Finding)>)> {
    let mut found = Findings::listed();
    let (task, network) = open(loaded, registry, context, has_model, &mut found);
    // The parameters, and the two moments of the optimizer.
    let trained_copies = 3;
    let averaged_copies = if loaded.config.training.average > 0.0 { 1 } else { 0 };
    let bytes_per_parameter = (trained_copies + averaged_copies) * size_of::<f32>() as u64;
    let checkpoint_bytes = network.map(|network| network.model.parameter_count() as u64 * bytes_per_parameter);
    let steps = task.as_ref().and_then(|task| task.steps());
    Ok((Checked { task, steps, checkpoint_bytes }, found.end()?))
}

/// Opens everything, in the order in which mistakes are cheap to find.
fn open(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
    has_model: bool,
    found: &mut Findings,
) -> (Option<Box<dyn OpenedTask>>, Option<Network>) {
    let config = &loaded.config;
    let notes = found.open("run", || loaded.without_effect(registry));
    found.note("run", || notes.into_iter().flatten());
    found.open("run", || check_ranks(config, context.ranks.as_ref()));
    found.note("run", || crate::on_finish::missing_programs(config));
    // The device is opened before the components, which open it too, so that its error is not reported as theirs.
    let has_device = found.open("run", || roll_backends::device(&context.backend)).is_some();
    let opening = Opening { loaded, registry, context, has_device, has_model };
    let mut reward = None;
    if has_device {
        reward = found.open("reward", || TrainedReward::open(&config.reward, registry, context)).flatten();
    }
    // In a validation, ranks play different numbers of turns. With `OverlappedRanks`, a rank that is done continues to
    // send its part of sharded weights to the other ranks until all are done.
    let overlapped = BuildContext { ranks: OverlappedRanks::of(context.ranks.clone()), ..context.clone() };
    let algorithm = found.open("algo", || registry.algorithm(&config.algo.name, &config.algo.options, &overlapped));
    let can_check = reward.is_some() || config.reward.is_empty();
    match algorithm.map(|algorithm| algorithm.samples()) {
        Some(Samples::Clips(algorithm)) => {
            let refuse_env = || if config.env.is_some() { Err(acts_in_no_environment()) } else { Ok(()) };
            let can_check = found.open("env", refuse_env).is_some() && can_check;
            match found.open("algo", || TaskType::of_clips(&config.algo.name)) {
                Some(task) => (task.open)(&opening, OpenedAlgorithm { algorithm, can_check }, reward, found),
                None => (None, None),
            }
        }
        Some(Samples::Own(mut algorithm)) => {
            let can_check = open_environments(&opening, algorithm.as_mut(), found) && can_check;
            match found.open("algo", || TaskType::of_own_data(&config.algo.name)) {
                Some(task) => (task.open)(&opening, OpenedAlgorithm { algorithm, can_check }, reward, found),
                None => (None, None),
            }
        }
        None => {
            let mut network = opening.network(found);
            if let Some(network) = &mut network {
                network.attach(config, found);
            }
            TaskType::all().for_each(|task| task.check_sections(&opening, network.as_mut(), found));
            (None, network)
        }
    }
}

/// Makes the environments that the algorithm acts in, if the configuration names one. Returns false after a problem.
fn open_environments(opening: &Opening<'_>, algorithm: &mut dyn OwnDataAlgorithm, found: &mut Findings) -> bool {
    let Opening { loaded, registry, context, .. } = *opening;
    let Some(env) = &loaded.config.env else { return true };
    let mut make = || registry.environment(&env.name, &env.options, context);
    found.open("env", || algorithm.open_environments(&mut make)).is_some()
}

/// Fails if the configuration asks for ranks that are threads, and this thread is not a rank.
fn check_ranks(config: &RunConfig, ranks: &dyn Communicator) -> Result<()> {
    if config.ranks > 1 && ranks.world_size() == 1 {
        let problem = format!("`ranks: {}`: a trainer of several ranks is opened by `ranks::run`", config.ranks);
        return Err(Error::Misuse(problem));
    }
    Ok(())
}
