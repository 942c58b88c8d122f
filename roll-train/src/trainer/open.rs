//! From a configuration to everything that a run consists of.

use std::sync::Arc;

use roll_backends::overlap::OverlappedRanks;
use roll_core::{BuildContext, Communicator, DataSource, Error, Kind, Model, Registry, Result, RewardScorer, Strategy};
use roll_data::{Batches, Dataset, Metadata};
use roll_rewards::WeightedSum;

use super::Trainer;
use crate::cache::{self, CachedModel, CachedReward};
use crate::config::LoadedConfig;
use crate::evaluation::Evaluator;
use crate::results::SetLabels;
use crate::results::record::Record;
use crate::sample_prompts::SamplePrompts;

impl Trainer {
    /// Opens data and networks, on the ranks of `context`. With [`crate::config::RunConfig::ranks`] above 1 it belongs
    /// inside [`crate::ranks::run`].
    pub fn new(loaded: LoadedConfig, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let ranks = context.ranks.as_ref();
        let notes = loaded.without_effect(registry)?;
        if ranks.rank().0 == 0 {
            notes.iter().for_each(|note| tracing::warn!("{note}"));
        }
        let config = &loaded.config;
        if config.ranks > 1 && ranks.world_size() == 1 {
            let found = config.ranks;
            return Err(Error::Misuse(format!(
                "`ranks: {found}`: a trainer of several ranks is opened by `ranks::run`"
            )));
        }
        let data_config = config.data.resolved(|path| context.resolve(path));
        // Before the components, which open it too: an error is not theirs.
        roll_backends::device(&context.backend)?;
        let mut reward = reward(&loaded, registry, context)?;
        // In a validation, ranks play different numbers of turns: one that is done must serve the others its part of
        // sharded weights until all are.
        let serving = BuildContext { ranks: OverlappedRanks::of(context.ranks.clone()), ..context.clone() };
        let mut algorithm = registry.algorithm(&config.algo.name, &config.algo.options, &serving)?;
        let store = match algorithm.data_source() {
            DataSource::Clips => cache::open(&data_config)?,
            DataSource::Own { .. } => None,
        };
        let source = algorithm.data_source();
        // Before the model, which takes minutes to open.
        let metadata = match source {
            DataSource::Clips => Some(Metadata::open(&data_config)?),
            DataSource::Own { .. } => None,
        };
        if ranks.rank().0 == 0 {
            unused_end_images(&loaded, metadata.as_ref()).iter().for_each(|note| tracing::warn!("{note}"));
        }
        if let Some(env) = &config.env {
            algorithm.open_environments(&mut || registry.environment(&env.name, &env.options, context))?;
        }
        let mut strategy = registry.strategy(&config.strategy.name, &config.strategy.options, context)?;
        trains_on_all_ranks(&config.strategy.name, strategy.as_ref(), ranks, registry)?;
        let (placement, token_ranks) = (strategy.weight_placement(), strategy.ranks().tokens.clone());
        let placed = BuildContext { placement, token_ranks, ..context.clone() };
        let mut model = registry.model(&config.model.name, &config.model.options, &placed)?;
        if let Some(tokens) = &placed.token_ranks {
            shards_tokens(&config.model.name, model.as_ref(), tokens.world_size())?;
            if config.evaluation.metadata.is_some() || config.evaluation.train_samples > 0 {
                let problem = "clips are not evaluated where several ranks work on one sample \
                               (`strategy.sequence_parallel_size`): leave out `evaluation.metadata` and \
                               `evaluation.train_samples`; `roll generate` and `roll score` take the adapter";
                return Err(Error::config("evaluation", problem));
            }
        }
        follows_placement(&config.model.name, model.as_ref(), strategy.as_ref());
        let unit = model.as_diffusion().map(|model| model.video_unit()).unwrap_or_default();
        let dataset = metadata.map(|metadata| Dataset::new(metadata, &data_config, unit)).transpose()?.map(Arc::new);
        let cut = dataset.as_ref().and_then(|_| data_config.unit_note(unit));
        if let Some(note) = cut.filter(|_| ranks.rank().0 == 0) {
            tracing::warn!("{note}");
        }
        if let Some(store) = &store {
            tracing::info!("encodings are kept in {} (`data.cache_dir`)", store.directory().display());
            model = CachedModel::wrap(model, store)?;
            reward = reward.map(|reward| CachedReward::wrap(reward, store)).transpose()?;
        }
        algorithm.check(model.as_mut(), reward.as_deref())?;
        strategy.attach(model.as_mut(), &config.training.optimizer())?;

        let t = &config.training;
        let per_step = t.per_device_train_batch_size * t.gradient_accumulation_steps;
        let communicator = strategy.ranks().all.as_ref();
        let noise = config.noise();
        let evaluator = match &dataset {
            Some(dataset) => Evaluator::open(&loaded, dataset, unit, registry, context, communicator)?,
            None => None,
        };
        let prompts = SamplePrompts::open(&loaded, model.as_mut(), unit, context)?;
        let held_out = evaluator.as_ref().and_then(Evaluator::unseen);
        let validates = held_out.is_some_and(|clips| algorithm.hold_out(clips)) || source != DataSource::Clips;
        let evaluator = evaluator.filter(|_| !validates);
        if validates && (config.evaluation.train_samples > 0 || !config.evaluation.check.is_empty()) {
            tracing::warn!(
                "`evaluation.train_samples`, `evaluation.check` and `evaluation.stop_when` have no effect: `{}` \
                 measures its loss on the clips of `evaluation.metadata`, and generates none",
                config.algo.name
            );
        }
        let data = dataset.map(|dataset| {
            let ranks = strategy.ranks().data.as_ref();
            let data = Batches::new(dataset, noise.clone(), per_step, ranks.rank(), ranks.world_size());
            data.in_micro_batches(t.per_device_train_batch_size)
        });
        let most = config.max_steps.unwrap_or(u64::MAX);
        let steps = match (config.steps, &data, source) {
            (Some(steps), ..) => steps,
            (None, Some(data), _) => data.steps(t.num_train_epochs).min(most),
            (None, None, DataSource::Own { steps_per_epoch: Some(n) }) => {
                n.saturating_mul(t.num_train_epochs).min(most)
            }
            (None, None, _) => {
                let problem = format!("`{}` makes its data as it goes: say how many steps it takes", config.algo.name);
                return Err(Error::config("steps", problem));
            }
        };
        if steps == 0 {
            return Err(Error::config("steps", "there is nothing to do: 0 steps"));
        }
        let schedule = t.schedule(steps);
        let measure = reward.as_ref().map(|reward| reward.measures()).unwrap_or_default();
        let labels = SetLabels::new(&measure, config.evaluation.check_labels());
        let headlines = algorithm.headlines();
        Ok(Self {
            loaded,
            model,
            reward,
            algorithm,
            strategy,
            data: data.map(|data| data.up_to(steps)),
            evaluator,
            prompts,
            validates,
            store,
            schedule,
            noise,
            labels,
            headlines,
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

/// A note when the metadata name last frames that the model is not asked to take.
fn unused_end_images(loaded: &LoadedConfig, metadata: Option<&Metadata>) -> Option<String> {
    // The option of models that take pictures beside the prompt.
    let inputs = loaded.config.model.options.get("extra_inputs")?.as_str()?;
    let given = metadata?.rows.iter().filter(|row| row.end_image.is_some()).count();
    (given > 0 && !inputs.split(',').any(|input| input.trim() == "end_image")).then(|| {
        format!(
            "{given} rows of `data.metadata` have an `end_image`, which has no effect: `model.extra_inputs: \
             input_image,end_image` lets the model take it"
        )
    })
}

/// The configured rewards as one.
pub fn reward(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
) -> Result<Option<Box<dyn RewardScorer>>> {
    match loaded.config.reward.as_slice() {
        [] => Ok(None),
        rewards => WeightedSum::from_config(rewards, registry, context).map(Some),
    }
}

/// Fails when the strategy knows fewer processes than there are: each would train a model of its own.
fn trains_on_all_ranks(
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

/// Fails when the model does not divide the tokens of a pass among `ranks`: each would compute all of them, and the sum
/// of their gradients would be several times the gradient.
fn shards_tokens(name: &str, model: &dyn Model, ranks: usize) -> Result<()> {
    if model.distribution().token_ranks == ranks {
        return Ok(());
    }
    let problem = format!("the model `{name}` cannot divide the tokens of a pass among {ranks} ranks: expected 1");
    Err(Error::config("strategy.sequence_parallel_size", problem))
}

/// Warns when the strategy wants frozen weights in a place that the model does not know.
fn follows_placement(name: &str, model: &dyn Model, strategy: &dyn Strategy) {
    if strategy.weight_placement().is_some() && model.distribution().weights.is_none() {
        tracing::warn!(
            "the model `{name}` cannot stream or divide its frozen weights: they stay where they are, whatever the \
             section `strategy` says"
        );
    }
}
