//! From a configuration to everything that a run consists of.

use std::sync::Arc;

use roll_backends::optimizer::{LrSchedule, LrSchedulerType};
use roll_core::config::Loaded;
use roll_core::{BuildContext, DataSource, Error, Registry, Result, RewardScorer};
use roll_data::{Batches, Dataset};
use roll_rewards::WeightedSum;

use super::Trainer;
use crate::evaluation::Evaluator;
use crate::kept::{Kept, KeptTargets, Store};
use crate::record::Record;
use crate::{placement, ranks};

impl Trainer {
    /// Opens data and networks.
    pub fn new(loaded: Loaded, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let config = &loaded.config;
        let store = config.data.cache_dir.as_deref().map(Store::open).transpose()?;
        let mut reward = reward(&loaded, registry, context)?;
        let mut algorithm = registry.algorithm(&config.algo.name, &config.algo.options, context)?;
        let source = algorithm.data_source();
        let dataset = match source {
            DataSource::Clips => Some(Arc::new(Dataset::open(&config.data)?)),
            DataSource::Own { .. } => None,
        };
        if let Some(env) = &config.env {
            algorithm.open_environments(&mut || registry.environment(&env.name, &env.options, context))?;
        }
        let mut strategy = registry.strategy(&config.strategy.name, &config.strategy.options, context)?;
        ranks::check_strategy(&config.strategy.name, strategy.as_ref())?;
        let options = placement::model_options(config, registry)?;
        let mut model = registry.model(&config.model.name, &options, context)?;
        if let Some(store) = &store {
            model = Kept::wrap(model, store)?;
            reward = reward.map(|reward| KeptTargets::wrap(reward, store)).transpose()?;
        }
        algorithm.check(model.as_mut(), reward.as_deref())?;
        strategy.attach(model.as_mut(), &config.training.optimizer())?;

        let t = &config.training;
        let per_step = t.per_device_train_batch_size * t.gradient_accumulation_steps;
        let communicator = strategy.communicator();
        let noise = config.noise();
        let evaluator = match &dataset {
            Some(dataset) => Evaluator::open(&loaded, dataset, registry, context)?,
            None => None,
        };
        let data = dataset.map(|dataset| {
            let data = Batches::new(dataset, noise.clone(), per_step, communicator.rank(), communicator.world_size());
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
        let schedule = LrSchedule::new(schedule_type(&t.lr_scheduler_type)?, t.learning_rate, t.warmup_steps, steps);
        let identity = config.reward.iter().any(|r| r.name == "insightface");
        Ok(Self {
            loaded,
            model,
            reward,
            algorithm,
            strategy,
            data,
            evaluator,
            store,
            schedule,
            noise,
            identity,
            steps,
            done: 0,
            record: Record::default(),
            seconds_before: 0.0,
            saved: None,
            saved_step: None,
        })
    }
}

fn schedule_type(name: &str) -> Result<LrSchedulerType> {
    serde_json::from_value(name.into()).map_err(|e| Error::config("training.lr_scheduler_type", e.to_string()))
}

/// The configured rewards as one.
pub fn reward(loaded: &Loaded, registry: &Registry, context: &BuildContext) -> Result<Option<Box<dyn RewardScorer>>> {
    match loaded.config.reward.as_slice() {
        [] => Ok(None),
        rewards => WeightedSum::from_config(rewards, registry, context).map(Some),
    }
}
