//! Runs of an algorithm that brings its own data: episodes of an agent, conversations.

use std::collections::BTreeMap;

use roll_core::{Error, Grad, OwnDataAlgorithm, Result, ResultExt, RewardScorer, StepContext, StepReport, inventory};
use serde_json::Value as Json;

use crate::config::{LoadedConfig, RunConfig};
use crate::findings::{Findings, Listing};
use crate::progress::counted;
use crate::rewards::TrainedReward;
use crate::task::{
    self, Network, OpenTask, OpenedAlgorithm, OpenedTask, Opening, Task, TaskContext, TaskFacts, TaskState, TaskType,
};

inventory::submit!(TaskType::Own(OpenTask {
    open: |opening, algorithm, reward, found| {
        let (parts, network) = OwnDataParts::open(opening, algorithm, reward, found);
        (Some(Box::new(parts)), network)
    },
    // This kind of task declares no section.
    check_sections: |_, _, _| (),
}));

/// The parts of a run whose algorithm brings its own data.
struct OwnDataParts {
    algorithm: Box<dyn OwnDataAlgorithm>,
    reward: Option<Box<dyn RewardScorer>>,
    /// The number of optimizer steps; `None` after a problem.
    steps: Option<u64>,
    /// Number of steps between validations.
    measured_every: u64,
}

impl OwnDataParts {
    /// Opens the network, and connects it with the algorithm and the reward.
    fn open(
        opening: &Opening<'_>,
        opened_algorithm: OpenedAlgorithm<dyn OwnDataAlgorithm>,
        reward: Option<TrainedReward>,
        found: &mut Findings,
    ) -> (Self, Option<Network>) {
        let (loaded, config) = (opening.loaded, &opening.loaded.config);
        let reward = reward.map(|reward| reward.scorer);
        let OpenedAlgorithm { mut algorithm, can_check } = opened_algorithm;
        let evaluation = Evaluation::of(loaded);
        let mut network = opening.network(found);
        if let Some(network) = &mut network {
            network.connect(algorithm.as_mut(), can_check, reward.as_deref(), config, found);
            found.open("evaluation", || evaluation.refuse_prompts(config, network));
        }
        found.note("evaluation", || evaluation.note_without_effect(config));
        let epochs = config.training.num_train_epochs;
        let steps_of_data = algorithm.steps_per_epoch().map(|steps| steps.saturating_mul(epochs));
        let steps = opening.steps(steps_of_data, found);
        (Self { algorithm, reward, steps, measured_every: evaluation.every }, network)
    }
}

impl OpenedTask for OwnDataParts {
    fn steps(&self) -> Option<u64> {
        self.steps
    }

    fn into_task(self: Box<Self>) -> Option<Box<dyn Task>> {
        let Self { algorithm, reward, steps, measured_every } = *self;
        let facts = TaskFacts {
            steps: steps?,
            headlines: algorithm.headlines(),
            measures: true,
            measured_every,
            idle_hint: "; of an agent: all episodes of each group may have one score",
            ..TaskFacts::default()
        };
        Some(Box::new(OwnDataTask { facts, algorithm, reward }))
    }

    fn look(&mut self, config: &RunConfig, _: usize, _: Grad, found: &mut Listing) -> Option<[usize; 2]> {
        found.section("data");
        if let Some(steps) = self.steps {
            found.good(format!("`{}` brings its own data: {}", config.algo.name, counted(steps, "step")));
        }
        None
    }
}

/// The keys of the section `evaluation` that concern a run without clips; their defaults if no task declares the
/// section.
struct Evaluation {
    /// Number of steps between validations.
    every: u64,
    /// Whether `prompts` lists prompts to make videos of.
    has_prompts: bool,
    /// Whether the section has keys that concern evaluated clips. This kind of run evaluates no clips.
    has_keys_for_clips: bool,
}

impl Evaluation {
    /// Reads the keys from a configuration.
    fn of(loaded: &LoadedConfig) -> Self {
        let value = |key| loaded.declared_value("evaluation", key);
        let number = |key| value(key).and_then(Json::as_u64).unwrap_or_default();
        let is_listed = |key| value(key).and_then(Json::as_array).is_some_and(|list| !list.is_empty());
        let has_stop_condition = value("stop_when").is_some_and(|condition| !condition.is_null());
        Self {
            every: number("every"),
            has_prompts: is_listed("prompts"),
            has_keys_for_clips: number("train_samples") > 0 || is_listed("check") || has_stop_condition,
        }
    }

    /// Fails if there are prompts to make videos of.
    fn refuse_prompts(&self, config: &RunConfig, network: &mut Network) -> Result<()> {
        if !self.has_prompts {
            return Ok(());
        }
        let name = match network.model.as_diffusion() {
            None => format!("the model `{}`", config.model.name),
            Some(_) => format!("the algorithm `{}` brings its own data, and", config.algo.name),
        };
        Err(Error::config("evaluation.prompts", format!("{name} makes no videos; leave them out")))
    }

    /// The note on keys that have no effect; `None` without such keys.
    fn note_without_effect(&self, config: &RunConfig) -> Option<String> {
        self.has_keys_for_clips.then(|| {
            format!(
                "`evaluation.train_samples`, `evaluation.check` and `evaluation.stop_when` have no effect: `{}` brings \
                 its own data, and generates no clips",
                config.algo.name
            )
        })
    }
}

/// A run of an algorithm that brings its own data, and validates itself.
struct OwnDataTask {
    facts: TaskFacts,
    algorithm: Box<dyn OwnDataAlgorithm>,
    reward: Option<Box<dyn RewardScorer>>,
}

impl Task for OwnDataTask {
    fn facts(&self) -> &TaskFacts {
        &self.facts
    }

    fn overview(&self, config: &RunConfig, steps_suffix: &str) -> Vec<(&'static str, String)> {
        let mut lines = task::component_lines(config, "");
        let (steps, algorithm) = (self.facts.steps, &config.algo.name);
        lines.push(("steps", format!("{steps}{steps_suffix}; `{algorithm}` brings its own data")));
        lines
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let step = context.step;
        let mut context = context.with(&[], self.reward.as_deref_mut());
        self.algorithm.step(&mut context).while_doing(|| format!("step {}", step + 1))
    }

    fn measure(&mut self, context: &mut TaskContext<'_>) -> Result<BTreeMap<String, f64>> {
        let is_kept = true;
        task::validate(self.algorithm.as_mut(), is_kept, context)
    }

    fn state(&self, is_writer: bool) -> Result<TaskState> {
        task::state(self.algorithm.as_ref(), is_writer)
    }

    fn restore(&mut self, state: &TaskState) -> Result<()> {
        task::restore(self.algorithm.as_mut(), state)
    }
}
