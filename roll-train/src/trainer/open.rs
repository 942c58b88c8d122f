//! From a configuration to everything that a run consists of.

use std::sync::Arc;

use roll_backends::overlap::OverlappedRanks;
use roll_core::{BuildContext, Communicator, DataSource, Error, Kind, Model, Registry, Result, RewardScorer, Strategy};
use roll_data::{Batches, Dataset, Metadata};

use super::Trainer;
use crate::cache::{self, CacheStore, CachedModel, CachedReward};
use crate::config::{LoadedConfig, RunConfig};
use crate::evaluation::Evaluator;
use crate::results::SetLabels;
use crate::results::record::Record;
use crate::sample_prompts::SamplePrompts;
use crate::weighted_sum::reward;

/// The reward of a run, if it has one.
type Reward = Option<Box<dyn RewardScorer>>;

impl Trainer {
    /// Opens data and networks, on the ranks of `context`. With [`crate::config::RunConfig::ranks`] above 1 it belongs
    /// inside [`crate::ranks::run`].
    pub fn new(loaded: LoadedConfig, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let ranks = context.ranks.as_ref();
        let warn = |note: String| {
            if ranks.rank().0 == 0 {
                tracing::warn!("{note}");
            }
        };
        loaded.without_effect(registry)?.into_iter().for_each(warn);
        let config = &loaded.config;
        check_ranks(config, ranks)?;
        let data_config = config.data.resolved(|path| context.resolve(path));
        // Before the components, which open it too: an error is not theirs.
        roll_backends::device(&context.backend)?;
        let mut reward = reward(&loaded, registry, context)?;
        // In a validation, ranks play different numbers of turns: a rank that is done must send its part of sharded
        // weights to the others until all are done.
        let serving = BuildContext { ranks: OverlappedRanks::of(context.ranks.clone()), ..context.clone() };
        let mut algorithm = registry.algorithm(&config.algo.name, &config.algo.options, &serving)?;
        let source = algorithm.data_source();
        let clips = source == DataSource::Clips;
        let store = if clips { cache::open(&data_config)? } else { None };
        // Before the model, which takes minutes to open.
        let metadata = clips.then(|| Metadata::open(&data_config)).transpose()?;
        unused_end_images(&loaded, metadata.as_ref()).into_iter().for_each(warn);
        if let Some(env) = &config.env {
            algorithm.open_environments(&mut || registry.environment(&env.name, &env.options, context))?;
        }
        let (mut strategy, mut model) = strategy_and_model(config, registry, context)?;
        let unit = model.as_diffusion().map(|model| model.video_unit()).unwrap_or_default();
        let dataset = metadata.map(|metadata| Dataset::new(metadata, &data_config, unit)).transpose()?.map(Arc::new);
        dataset.as_ref().and_then(|_| data_config.unit_note(unit)).into_iter().for_each(warn);
        if let Some(store) = &store {
            (model, reward) = cached(model, reward, store)?;
        }
        algorithm.check(model.as_mut(), reward.as_deref())?;
        strategy.attach(model.as_mut(), &config.training.optimizer())?;

        let communicator = strategy.ranks().all.as_ref();
        let open = |dataset: &Arc<Dataset>| Evaluator::open(&loaded, dataset, unit, registry, context, communicator);
        let evaluator = dataset.as_ref().map(open).transpose()?.flatten();
        let prompts = SamplePrompts::open(&loaded, model.as_mut(), unit, context)?;
        let held_out = evaluator.as_ref().and_then(Evaluator::unseen);
        let validates = held_out.is_some_and(|clips| algorithm.hold_out(clips)) || !clips;
        if validates {
            unused_evaluation(config).into_iter().for_each(warn);
        }
        let data = dataset.map(|dataset| batches(dataset, config, strategy.as_ref()));
        let steps = steps(config, data.as_ref(), source)?;
        let measure = reward.as_ref().map(|reward| reward.measures()).unwrap_or_default();
        Ok(Self {
            noise: config.noise(),
            labels: SetLabels::new(&measure, config.evaluation.check_labels()),
            headlines: algorithm.headlines(),
            schedule: config.training.schedule(steps),
            data: data.map(|data| data.up_to(steps)),
            evaluator: evaluator.filter(|_| !validates),
            loaded,
            model,
            reward,
            algorithm,
            strategy,
            prompts,
            validates,
            store,
            steps,
            done: 0,
            record: Record::default(),
            seconds_before: 0.0,
            saved: None,
            saved_step: None,
            stopped: None,
            pace: Default::default(),
        })
    }
}

/// Fails if the configuration asks for threads as ranks and this is not one of them.
fn check_ranks(config: &RunConfig, ranks: &dyn Communicator) -> Result<()> {
    if config.ranks > 1 && ranks.world_size() == 1 {
        let problem = format!("`ranks: {}`: a trainer of several ranks is opened by `ranks::run`", config.ranks);
        return Err(Error::Misuse(problem));
    }
    Ok(())
}

/// Model and reward with their encodings and targets in `store`.
fn cached(model: Box<dyn Model>, reward: Reward, store: &CacheStore) -> Result<(Box<dyn Model>, Reward)> {
    tracing::info!("encodings are kept in {} (`data.cache_dir`)", store.directory().display());
    let reward = reward.map(|reward| CachedReward::wrap(reward, store)).transpose()?;
    Ok((CachedModel::wrap(model, store)?, reward))
}

/// The batches of this rank.
fn batches(dataset: Arc<Dataset>, config: &RunConfig, strategy: &dyn Strategy) -> Batches {
    let (training, ranks) = (&config.training, strategy.ranks().data.as_ref());
    Batches::new(dataset, config.noise(), training.samples_per_rank(), ranks.rank(), ranks.world_size())
        .in_micro_batches(training.per_device_train_batch_size)
}

/// The strategy, and the model placed as the strategy wants it. Fails if they do not work together.
fn strategy_and_model(
    config: &RunConfig,
    registry: &Registry,
    context: &BuildContext,
) -> Result<(Box<dyn Strategy>, Box<dyn Model>)> {
    let strategy = registry.strategy(&config.strategy.name, &config.strategy.options, context)?;
    check_all_ranks_train(&config.strategy.name, strategy.as_ref(), context.ranks.as_ref(), registry)?;
    let (placement, token_ranks) = (strategy.weight_placement(), strategy.ranks().tokens.clone());
    let placed = BuildContext { placement, token_ranks, ..context.clone() };
    let model = registry.model(&config.model.name, &config.model.options, &placed)?;
    if let Some(tokens) = &placed.token_ranks {
        check_token_ranks(&config.model.name, model.as_ref(), tokens.world_size())?;
        if config.evaluation.metadata.is_some() || config.evaluation.train_samples > 0 {
            let problem = "clips are not evaluated where several ranks work on one sample \
                           (`strategy.sequence_parallel_size`): leave out `evaluation.metadata` and \
                           `evaluation.train_samples`; `roll generate` and `roll score` take the adapter";
            return Err(Error::config("evaluation", problem));
        }
    }
    warn_of_placement(&config.model.name, model.as_ref(), strategy.as_ref());
    Ok((strategy, model))
}

/// The number of optimizer steps. Fails if it is 0, or if the data have no end and the configuration sets none.
fn steps(config: &RunConfig, data: Option<&Batches>, source: DataSource) -> Result<u64> {
    let epochs = config.training.num_train_epochs;
    let of_data = match (data, source) {
        (Some(data), _) => Some(data.steps(epochs)),
        (None, DataSource::Own { steps_per_epoch }) => steps_per_epoch.map(|steps| steps.saturating_mul(epochs)),
        (None, DataSource::Clips) => None,
    };
    let of_data = of_data.map(|steps| steps.min(config.max_steps.unwrap_or(u64::MAX)));
    match config.steps.or(of_data) {
        Some(0) => Err(Error::config("steps", "there is nothing to do: 0 steps")),
        Some(steps) => Ok(steps),
        None => {
            let problem = format!("`{}` makes its data as it goes: say how many steps it takes", config.algo.name);
            Err(Error::config("steps", problem))
        }
    }
}

/// The note on keys of `evaluation` that an algorithm with a validation of its own does not read.
fn unused_evaluation(config: &RunConfig) -> Option<String> {
    (config.evaluation.train_samples > 0 || !config.evaluation.check.is_empty()).then(|| {
        format!(
            "`evaluation.train_samples`, `evaluation.check` and `evaluation.stop_when` have no effect: `{}` measures its \
             loss on the clips of `evaluation.metadata`, and generates none",
            config.algo.name
        )
    })
}

/// A note when the metadata name last frames that the model is not asked to take, or name none that it is asked to take.
fn unused_end_images(loaded: &LoadedConfig, metadata: Option<&Metadata>) -> Option<String> {
    // The option of models that take pictures besides the prompt.
    let inputs = loaded.config.model.options.get("extra_inputs")?.as_str()?;
    let given = metadata?.rows.iter().filter(|row| row.end_image.is_some()).count();
    match (given, inputs.split(',').any(|input| input.trim() == "end_image")) {
        (1.., false) => Some(format!(
            "{given} rows of `data.metadata` have an `end_image`, which has no effect: `model.extra_inputs: \
             input_image,end_image` lets the model take it"
        )),
        (0, true) => Some(
            "`end_image` in `model.extra_inputs` has no effect on training: no row of `data.metadata` has an `end_image`"
                .into(),
        ),
        _ => None,
    }
}

/// Fails when the strategy knows fewer processes than there are: each would train a model of its own.
fn check_all_ranks_train(
    name: &str,
    strategy: &dyn Strategy,
    ranks: &dyn Communicator,
    registry: &Registry,
) -> Result<()> {
    let (all, known) = (ranks.world_size(), strategy.ranks().all.world_size());
    if all == known {
        return Ok(());
    }
    let on_all = |name: &str| registry.division(name, &Default::default()).is_ok_and(|division| division.all_ranks);
    let strategies = registry.entries().iter().filter(|r| r.factory.kind() == Kind::Strategy).map(|r| r.name);
    let others: Vec<String> = strategies.filter(|name| on_all(name)).map(|name| format!("`{name}`")).collect();
    let problem = format!(
        "the job has {all} processes, and the strategy `{name}` trains on {known}; these train on all: {}",
        others.join(", ")
    );
    Err(Error::config("strategy.name", problem))
}

/// Fails when the model does not shard the tokens of a pass over `ranks`: each would compute all of them, and the sum of
/// their gradients would be several times the gradient.
fn check_token_ranks(name: &str, model: &dyn Model, ranks: usize) -> Result<()> {
    if model.distribution().token_ranks == ranks {
        return Ok(());
    }
    let problem = format!("the model `{name}` cannot divide the tokens of a pass among {ranks} ranks: expected 1");
    Err(Error::config("strategy.sequence_parallel_size", problem))
}

/// Warns when the strategy wants frozen weights in a place that the model does not know.
fn warn_of_placement(name: &str, model: &dyn Model, strategy: &dyn Strategy) {
    if strategy.weight_placement().is_some() && model.distribution().weights.is_none() {
        tracing::warn!(
            "the model `{name}` cannot stream or divide its frozen weights: they stay where they are, whatever the \
             section `strategy` says"
        );
    }
}
