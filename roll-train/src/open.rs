//! From a configuration to everything that a run consists of. The one place that knows which tasks there are.

use roll_backends::overlap::OverlappedRanks;
use roll_core::{BuildContext, Communicator, DataSource, Error, Registry, Result};

use crate::clips::{ClipConfig, ClipParts, TrainedReward, check_prompts};
use crate::config::{LoadedConfig, RunConfig};
use crate::findings::{Finding, Findings};
use crate::own_data::OwnDataParts;
use crate::task::{Network, OpenedAlgorithm, Opening, Task};

/// What a check of a run finds. A part is `None` if the run has none, or after a problem.
pub struct Checked {
    /// The parts of a run on clips.
    pub clips: Option<ClipParts>,
    /// The number of optimizer steps.
    pub steps: Option<u64>,
    /// Bytes of a checkpoint: trained parameters and the optimizer's two moments, in f32, and the averaged parameters.
    pub checkpoint_bytes: Option<u64>,
}

/// The parts of a task, by where its samples come from.
enum TaskParts {
    Clips(ClipParts),
    OwnData(OwnDataParts),
    /// The algorithm cannot be made.
    Unknown,
}

/// Opens a run, on the ranks of `context`. Fails with the first problem.
pub(crate) fn open_run(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
) -> Result<(Network, Box<dyn Task>)> {
    let mut found = Findings::logged(context.ranks.rank().0 == 0);
    let (parts, network) = open(loaded, registry, context, true, &mut found);
    found.end()?;
    let task = match parts {
        TaskParts::Clips(clips) => clips.whole().map(|task| Box::new(task) as Box<dyn Task>),
        TaskParts::OwnData(own) => own.whole().map(|task| Box::new(task) as Box<dyn Task>),
        TaskParts::Unknown => None,
    };
    network.zip(task).ok_or_else(|| Error::Misuse("a run was opened without one of its parts".into()))
}

/// Opens everything that can be opened, and returns it with the findings and their sections. Without `has_model`, neither
/// the model is opened nor what needs it.
pub(crate) fn open_check(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
    has_model: bool,
) -> Result<(Checked, Vec<(&'static str, Finding)>)> {
    let mut found = Findings::listed();
    let (parts, network) = open(loaded, registry, context, has_model, &mut found);
    let copies = if loaded.config.training.average > 0.0 { 4 } else { 3 };
    let checkpoint_bytes = network.map(|network| network.model.parameter_count() as u64 * 4 * copies);
    let (clips, steps) = match parts {
        TaskParts::Clips(clips) => {
            let steps = clips.steps;
            (Some(clips), steps)
        }
        TaskParts::OwnData(own) => (None, own.steps),
        TaskParts::Unknown => (None, None),
    };
    Ok((Checked { clips, steps, checkpoint_bytes }, found.end()?))
}

/// Opens everything, in the order in which mistakes are cheap to find.
fn open(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
    has_model: bool,
    found: &mut Findings,
) -> (TaskParts, Option<Network>) {
    let config = &loaded.config;
    let notes = found.open("run", || loaded.without_effect(registry));
    found.note("run", || notes.into_iter().flatten());
    found.open("run", || check_ranks(config, context.ranks.as_ref()));
    found.note("run", || crate::on_finish::missing_programs(config));
    // Before the components, which open it too: an error is not theirs.
    let has_device = found.open("run", || roll_backends::device(&context.backend)).is_some();
    let opening = Opening { loaded, registry, context, has_device, has_model };
    let reward = TrainedReward::open(&opening, found);
    let Some(opened) = open_algorithm(&opening, reward.is_some(), found) else {
        let mut network = opening.network(found);
        if let Some(network) = &mut network {
            network.attach(config, found);
        }
        check_prompts(&opening, network.as_mut(), found);
        return (TaskParts::Unknown, network);
    };
    match opened.algorithm.data_source() {
        DataSource::Clips => {
            let Some(clips) = found.open("run", || ClipConfig::of(loaded)) else {
                return (TaskParts::Unknown, None);
            };
            let (parts, network) = ClipParts::open(&opening, clips, opened, reward, found);
            (TaskParts::Clips(parts), network)
        }
        DataSource::Own { steps_per_epoch } => {
            let reward = reward.map(|reward| reward.scorer);
            let (parts, network) = OwnDataParts::open(&opening, opened, steps_per_epoch, reward, found);
            (TaskParts::OwnData(parts), network)
        }
    }
}

/// Makes the algorithm and the environments that it acts in.
fn open_algorithm(opening: &Opening<'_>, has_reward: bool, found: &mut Findings) -> Option<OpenedAlgorithm> {
    let Opening { loaded, registry, context, .. } = *opening;
    let config = &loaded.config;
    // In a validation, ranks play different numbers of turns: a rank that is done must send its part of sharded weights
    // to the others until all are done.
    let serving = BuildContext { ranks: OverlappedRanks::of(context.ranks.clone()), ..context.clone() };
    let mut algorithm = found.open("algo", || registry.algorithm(&config.algo.name, &config.algo.options, &serving))?;
    let mut can_check = has_reward || config.reward.is_empty();
    if let Some(env) = &config.env {
        let mut make = || registry.environment(&env.name, &env.options, context);
        can_check &= found.open("env", || algorithm.open_environments(&mut make)).is_some();
    }
    Some(OpenedAlgorithm { algorithm, can_check })
}

/// Fails if the configuration asks for threads as ranks and this is not one of them.
fn check_ranks(config: &RunConfig, ranks: &dyn Communicator) -> Result<()> {
    if config.ranks > 1 && ranks.world_size() == 1 {
        let problem = format!("`ranks: {}`: a trainer of several ranks is opened by `ranks::run`", config.ranks);
        return Err(Error::Misuse(problem));
    }
    Ok(())
}
