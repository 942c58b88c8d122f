//! The parts that all tasks open in the same way: strategy and model, the check of the algorithm, the number of
//! steps.

use roll_core::{
    Algorithm, BuildContext, Communicator, Error, Kind, Model, Registry, Result, RewardScorer, Strategy, plan::Passes,
};

use crate::config::{LoadedConfig, RunConfig};
use crate::findings::Findings;

/// A run that is being opened.
#[derive(Clone, Copy)]
pub struct Opening<'a> {
    /// The configuration.
    pub loaded: &'a LoadedConfig,
    /// The components that can be made.
    pub registry: &'a Registry,
    /// The context in which components are made.
    pub context: &'a BuildContext,
    /// Whether the backend has its device. Without it, components that open the device would report its error again.
    pub has_device: bool,
    /// Whether the model is opened. A check does not open a model whose files would have to be downloaded first.
    pub has_model: bool,
}

/// The algorithm `A`, and whether it can be checked.
pub struct OpenedAlgorithm<A: ?Sized> {
    /// The algorithm.
    pub algorithm: Box<A>,
    /// Whether the algorithm can be checked: whether the configured environments and rewards could be opened.
    pub can_check: bool,
}

/// The model under training, and the strategy that trains it.
pub struct Network {
    /// The model.
    pub model: Box<dyn Model>,
    /// The strategy.
    pub strategy: Box<dyn Strategy>,
}

impl Opening<'_> {
    /// Opens the strategy, and the model with its weights where the strategy places them.
    pub fn network(&self, found: &mut Findings) -> Option<Network> {
        if !self.has_device || !self.has_model {
            return None;
        }
        found.open("model", || open_network(&self.loaded.config, self.registry, self.context))
    }

    /// The number of optimizer steps. `steps_of_data` is the number of steps that all epochs of the data take; `None`
    /// for data without an end.
    pub fn steps(&self, steps_of_data: Option<u64>, found: &mut Findings) -> Option<u64> {
        let config = &self.loaded.config;
        let steps = found.open("run", || resolved_steps(config, steps_of_data))?;
        found.note("run", || config.training.warmup_note(steps));
        Some(steps)
    }
}

impl Network {
    /// Checks that the algorithm works with model and reward, unless [`OpenedAlgorithm::can_check`] is false. Then
    /// attaches the model to the strategy.
    pub fn connect(
        &mut self,
        algorithm: &mut dyn Algorithm,
        can_check: bool,
        reward: Option<&dyn RewardScorer>,
        config: &RunConfig,
        found: &mut Findings,
    ) {
        let Self { model, strategy } = self;
        if can_check {
            found.open("algo", || algorithm.check(model.as_mut(), reward));
        }
        attach_model(strategy.as_mut(), model.as_mut(), config, found);
    }

    /// Attaches the model of a run whose algorithm cannot be made.
    pub fn attach(&mut self, config: &RunConfig, found: &mut Findings) {
        attach_model(self.strategy.as_mut(), self.model.as_mut(), config, found);
    }
}

/// Attaches the model to the strategy, with the optimizer of the configuration.
fn attach_model(strategy: &mut dyn Strategy, model: &mut dyn Model, config: &RunConfig, found: &mut Findings) {
    found.open("run", || strategy.attach(model, &config.training.optimizer()));
}

/// The strategy, and the model with its weights where the strategy places them. Fails if they do not work together.
fn open_network(config: &RunConfig, registry: &Registry, context: &BuildContext) -> Result<Network> {
    let strategy = registry.strategy(&config.strategy.name, &config.strategy.options, context)?;
    check_all_ranks_train(&config.strategy.name, strategy.as_ref(), context.ranks.as_ref(), registry)?;
    let (placement, token_ranks) = (strategy.weight_placement(), strategy.ranks().tokens.clone());
    let passes = registry.passes(&config.algo.name, &config.algo.options).ok();
    let recorded_passes = passes.as_ref().map(Passes::held);
    let needs_reference = passes.is_none_or(|passes| passes.needs_reference());
    let model_context = BuildContext { placement, token_ranks, recorded_passes, needs_reference, ..context.clone() };
    let model = registry.model(&config.model.name, &config.model.options, &model_context)?;
    if let Some(token_ranks) = &model_context.token_ranks {
        check_token_ranks(&config.model.name, model.as_ref(), token_ranks.world_size())?;
    }
    if strategy.weight_placement().is_some() && model.distribution().weights.is_none() {
        tracing::warn!(
            "the model `{}` cannot stream or divide its frozen weights: they stay where they are, whatever the section \
             `strategy` says",
            config.model.name
        );
    }
    Ok(Network { model, strategy })
}

/// The number of optimizer steps. Fails if it is 0, or if the data have no end and the configuration sets none.
fn resolved_steps(config: &RunConfig, steps_of_data: Option<u64>) -> Result<u64> {
    let limited_steps = steps_of_data.map(|steps| steps.min(config.max_steps.unwrap_or(u64::MAX)));
    match config.steps.or(limited_steps) {
        Some(0) => Err(Error::config("steps", "there is nothing to do: 0 steps")),
        Some(steps) => Ok(steps),
        None => {
            let problem = format!("`{}` makes its data as it goes: say how many steps it takes", config.algo.name);
            Err(Error::config("steps", problem))
        }
    }
}

/// Fails if the strategy knows fewer processes than there are, because each process would then train a model of its
/// own.
fn check_all_ranks_train(
    name: &str,
    strategy: &dyn Strategy,
    ranks: &dyn Communicator,
    registry: &Registry,
) -> Result<()> {
    let (process_count, trained_count) = (ranks.world_size(), strategy.ranks().all.world_size());
    if process_count == trained_count {
        return Ok(());
    }
    let trains_on_all =
        |name: &str| registry.division(name, &Default::default()).is_ok_and(|division| division.all_ranks);
    let strategies = registry.entries().iter().filter(|entry| entry.factory.kind() == Kind::Strategy);
    let names = strategies.map(|entry| entry.name).filter(|name| trains_on_all(name));
    let remedies: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    let problem = format!(
        "the job has {process_count} processes, and the strategy `{name}` trains on {trained_count}; these train on \
         all: {}",
        remedies.join(", ")
    );
    Err(Error::config("strategy.name", problem))
}

/// Fails if the model does not shard the tokens of a pass over `ranks`. Each rank would then compute all tokens, and
/// the sum of the ranks' gradients would be several times the gradient.
fn check_token_ranks(name: &str, model: &dyn Model, ranks: usize) -> Result<()> {
    if model.distribution().token_ranks == ranks {
        return Ok(());
    }
    let problem = format!("the model `{name}` cannot divide the tokens of a pass among {ranks} ranks: expected 1");
    Err(Error::config("strategy.sequence_parallel_size", problem))
}
