//! Runs on clips: the rows of `data.metadata`, rewards of generated videos, evaluations before and after training.
//!
//! `config` declares the sections `data` and `evaluation`. `open` makes a `ClipTask` from a configuration; `rows` and
//! `notes` report rows and options that cannot be used or have no effect. Between steps, `measure` evaluates
//! ([`evaluation`]), writes sample prompts and validates; `suspicion` looks for reward hacking by the rule of
//! [`hacking`]. At the end, `preference` asks a reward that compares videos, and `comparison` shows clips before and
//! after training. [`cache`] keeps encodings. `look` looks closer at the data for `roll check`.

pub mod cache;
pub mod evaluation;
pub mod hacking;

mod comparison;
mod config;
mod look;
mod measure;
mod notes;
mod open;
mod overview;
mod preference;
mod rows;
mod sample_prompts;
mod samples;
mod suspicion;

use std::collections::BTreeMap;

use roll_core::{ClipAlgorithm, Result, ResultExt, RewardScorer, StepContext, StepReport, communicator};
use roll_train::config::RunConfig;
use roll_train::results;
use roll_train::results::record::Record;
use roll_train::run_dir::RunDir;
use roll_train::task::{self, Task, TaskContext, TaskFacts, TaskResults, TaskState};

use self::cache::CacheStore;
use self::evaluation::Evaluator;
use self::sample_prompts::SamplePrompts;
use crate::rows::Batches;

pub use config::{CheckRewards, ClipConfig, EvaluationConfig, SamplePrompt, StopWhen};
pub use rows::{clip_notes, counted_rows, row_noun};

/// Number of prompts that are announced to a model before it encodes them.
const EXPECTED_PROMPTS: usize = 64;

/// A run on clips.
struct ClipTask {
    facts: TaskFacts,
    config: ClipConfig,
    algorithm: Box<dyn ClipAlgorithm>,
    /// The batches of this rank.
    data: Batches,
    /// The reward that is trained on, if there is one.
    reward: Option<Box<dyn RewardScorer>>,
    /// The store of encodings in `data.cache_dir`.
    store: Option<CacheStore>,
    held_out: HeldOut,
    /// Videos of `evaluation.prompts`.
    prompts: Option<SamplePrompts>,
    /// The number of rows of `evaluation.metadata` that are trained on, too.
    seen: usize,
}

/// The use of the clips of the section `evaluation`.
enum HeldOut {
    /// No clip is named.
    Nothing,
    /// Videos are generated for the clips and scored.
    Evaluated(Evaluator),
    /// The algorithm holds the clips for its own validation.
    Validated,
}

impl HeldOut {
    fn evaluator(&self) -> Option<&Evaluator> {
        match self {
            Self::Evaluated(evaluator) => Some(evaluator),
            Self::Nothing | Self::Validated => None,
        }
    }
}

impl Task for ClipTask {
    fn facts(&self) -> &TaskFacts {
        &self.facts
    }

    fn overview(&self, config: &RunConfig, steps_suffix: &str) -> Vec<(&'static str, String)> {
        overview::lines(self, config, steps_suffix)
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let step = context.step;
        if let Some(model) = context.model.as_diffusion() {
            model.expect_prompts(&self.data.prompts(step, EXPECTED_PROMPTS));
        }
        let batch = self.data.batch(step)?;
        let mut context_of_batch = context.with(&batch.samples, self.reward.as_deref_mut());
        let mut report = self.algorithm.step(&mut context_of_batch).while_doing(|| format!("step {}", step + 1))?;
        let skipped = communicator::join(context.strategy.ranks().data.as_ref(), &batch.skipped)?;
        let skipped: Vec<_> = skipped.into_iter().flatten().collect();
        if !skipped.is_empty() {
            report.metrics.insert("data/skipped".into(), skipped.len() as f64);
        }
        report.skipped.extend(skipped);
        Ok(report)
    }

    fn measure(&mut self, context: &mut TaskContext<'_>) -> Result<BTreeMap<String, f64>> {
        let mut metrics = BTreeMap::new();
        if context.step == 0 {
            context.record.seen = self.seen;
        }
        if !context.record.evaluations.iter().any(|evaluation| evaluation.step == context.step)
            && let Some(results) = self.evaluate(context)?
        {
            metrics.extend(results::metrics(&results, &self.facts.labels));
            metrics.extend(suspicion::record(&self.facts.labels, context));
        }
        self.write_sample_prompts(context)?;
        // An interrupted process leaves the result of a validation on clips to the next process.
        let is_kept = matches!(self.held_out, HeldOut::Validated);
        metrics.extend(task::validate(self.algorithm.as_mut(), is_kept, context)?);
        Ok(metrics)
    }

    fn stop_reason(&self, record: &Record, step: u64) -> Option<String> {
        suspicion::stop_reason(&self.config.evaluation, &self.facts.labels, record, step)
    }

    fn end(&mut self, context: &mut TaskContext<'_>, is_early: bool) -> Result<()> {
        if is_early {
            measure::keep_newest_as_last(context)?;
        }
        self.compare_ends(context)?;
        if let Some(store) = &self.store {
            let [found, computed] = store.counts();
            tracing::info!("encodings: {found} read from the cache, {computed} computed");
        }
        Ok(())
    }

    fn results(&self, dir: Option<&RunDir>, record: &Record) -> Result<TaskResults> {
        let written = match dir {
            Some(dir) => comparison::write_results(dir, record, self.held_out.evaluator(), &self.facts.labels)?,
            None => Vec::new(),
        };
        Ok(TaskResults { written, encodings: self.store.as_ref().map(CacheStore::counts) })
    }

    fn state(&self, saves: bool) -> Result<TaskState> {
        task::state(self.algorithm.as_ref(), saves)
    }

    fn restore(&mut self, state: &TaskState) -> Result<()> {
        task::restore(self.algorithm.as_mut(), state)
    }
}
