//! The training loop: batches in, metrics, samples and checkpoints out.

mod journal;
mod state;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use roll_backends::optimizer::{LrSchedule, LrSchedulerType};
use roll_core::checkpoint::Checkpoint;
use roll_core::config::Loaded;
use roll_core::run_dir::{RunDir, step_name};
use roll_core::{
    Algorithm, BuildContext, DataSource, Error, Fault, Model, Noise, Registry, Result, ResultExt, RewardScorer,
    StepContext, StepReport, Strategy, Validation, communicator,
};
use roll_data::{Batch, Batches, Dataset};
use roll_rewards::WeightedSum;

use crate::evaluation::{self, Evaluator, Results};
use crate::interrupt::Interrupt;
use crate::kept::{Kept, KeptTargets, Store};
use crate::outcome;
use crate::progress::Bar;
use crate::record::{self, Evaluation, Record, Skipped, Validated};
use crate::trajectories;
use crate::{placement, ranks};
use journal::Journal;
pub use state::recorded;

/// Everything a run consists of, checked before anything is written.
pub struct Trainer {
    loaded: Loaded,
    model: Box<dyn Model>,
    reward: Option<Box<dyn RewardScorer>>,
    algorithm: Box<dyn Algorithm>,
    strategy: Box<dyn Strategy>,
    /// `None`: the algorithm brings its own.
    data: Option<Batches>,
    evaluator: Option<Evaluator>,
    /// Of `data.cache_dir`.
    store: Option<Store>,
    schedule: LrSchedule,
    noise: Noise,
    /// Whether a reward is the identity score: evaluations are then called so.
    identity: bool,
    steps: u64,
    /// Steps that are done, also before this process.
    done: u64,
    /// What was done until now.
    record: Record,
    /// Seconds of the processes before this one.
    seconds_before: f64,
    /// The newest checkpoint that this process wrote or went on from.
    saved: Option<Checkpoint>,
}

/// How a run ended; written to `summary.json`.
#[derive(Debug, serde::Serialize)]
pub struct Summary {
    /// Steps taken.
    pub steps: u64,
    /// Wall-clock seconds of the loop.
    pub seconds: f64,
    /// Trainable parameters.
    pub parameters: usize,
    /// Metrics of the first step.
    pub first: BTreeMap<String, f64>,
    /// Metrics of the last step.
    pub last: BTreeMap<String, f64>,
    /// Samples that were left out.
    pub skipped_samples: u64,
    /// The first of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<Skipped>,
    /// Updates that were left out because a value was not finite.
    pub skipped_updates: u64,
    /// Updates whose gradient was scaled down to `training.max_grad_norm`.
    pub clipped_updates: u64,
    /// The trained adapters, or the experts when all their weights are trained.
    pub adapter: Vec<PathBuf>,
    /// Evaluations before and after: `unseen_before`, `unseen_after`, `unseen_gain`, ..., `kl`; of an agent
    /// `success_before`, `success_after`.
    #[serde(flatten)]
    pub figures: BTreeMap<String, serde_json::Value>,
    /// The same for people.
    #[serde(skip)]
    pub lines: Vec<(String, String)>,
    /// What a person would open: name and path.
    #[serde(skip)]
    pub written: Vec<(&'static str, PathBuf)>,
}

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
        })
    }

    /// Trains, writing to `dir`, which only rank 0 has. Nothing is written before the first step is done. A signal ends
    /// it with [`Error::Interrupted`], after a checkpoint.
    pub fn run(mut self, dir: Option<&RunDir>) -> Result<Summary> {
        let interrupt = Interrupt::catch()?;
        let bar = Bar::new(self.steps, "steps", dir.is_some());
        let bar = bar.stopping(self.may_stop_within_steps().then_some(&interrupt));
        bar.skip(self.done);
        let mut journal = Journal::new(dir, self.done);
        let start = Instant::now();
        self.seconds_before = self.record.seconds;
        if let Some(dir) = dir {
            tracing::info!(
                "{} trainable parameters, {} steps, writing to {}",
                self.model.parameter_count(),
                self.steps - self.done,
                dir.path().display()
            );
        }
        let trained = self.train(&mut journal, &interrupt, &bar, start);
        bar.finish();
        self.record.seconds = self.seconds_before + start.elapsed().as_secs_f64();
        match trained {
            Err(error) if error.fault() == Fault::Interrupt => {
                self.stop(&mut journal)?;
                Err(Error::Interrupted)
            }
            Err(error) => Err(error),
            Ok(()) => self.finish(dir),
        }
    }

    fn train(&mut self, journal: &mut Journal, interrupt: &Interrupt, bar: &Bar, start: Instant) -> Result<()> {
        if self.done == 0 && self.record.evaluations.is_empty() {
            self.evaluate(journal.dir.as_ref(), interrupt)?;
        }
        if self.done == 0 && self.record.validations.is_empty() {
            self.validate(journal, bar)?;
        }
        if let Some(metrics) = self.record.pending.clone() {
            journal.open(&self.loaded, &self.record, self.identity)?;
            self.complete(journal, interrupt, bar, record::restored(&metrics))?;
        }
        while self.done < self.steps {
            if self.is_asked_to_stop(interrupt)? {
                return Err(Error::Interrupted);
            }
            let want_videos = journal.dir.is_some() && self.wants_samples();
            let begun = Instant::now();
            let stepped = self.step(self.done, want_videos, bar);
            if stepped.as_ref().is_err_and(|error| error.fault() != Fault::Interrupt) {
                self.rescue(journal);
            }
            let (mut report, learning_rate) = stepped?;
            self.done += 1;
            self.record.seconds = self.seconds_before + start.elapsed().as_secs_f64();
            self.record.step(self.done, &report, self.loaded.config.training.max_grad_norm);
            journal.open(&self.loaded, &self.record, self.identity)?;
            report.metrics.insert("lr".into(), learning_rate);
            report.metrics.insert("time/total".into(), begun.elapsed().as_secs_f64());
            journal.tell(self.done, &report)?;
            self.complete(journal, interrupt, bar, report.metrics)?;
            bar.advance();
        }
        Ok(())
    }

    /// What follows a step: evaluation, metrics, checkpoint. Stopped in the evaluation, it is done again from its
    /// beginning by the process that goes on.
    fn complete(
        &mut self,
        journal: &mut Journal,
        interrupt: &Interrupt,
        bar: &Bar,
        mut metrics: BTreeMap<String, f64>,
    ) -> Result<()> {
        let config = &self.loaded.config;
        let (step, last) = (self.done, self.done == self.steps);
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let (logs, evaluates, saves) =
            (due(config.logging_steps) || last, due(config.evaluation.every) || last, due(config.save_steps) || last);
        self.record.pending = Some(record::stored(&metrics));
        if evaluates {
            let evaluated = self.evaluate(journal.dir.as_ref(), interrupt);
            if evaluated.as_ref().is_err_and(|error| error.fault() != Fault::Interrupt) {
                self.rescue(journal);
            }
            if let Some(results) = evaluated? {
                metrics.extend(outcome::metrics(&results, self.identity));
            }
            let validated = self.validate(journal, bar);
            if validated.as_ref().is_err_and(|error| error.fault() != Fault::Interrupt) {
                self.rescue(journal);
            }
            metrics.extend(validated?);
        }
        self.record.pending = None;
        self.record.finished(&metrics);
        if logs || metrics.keys().any(|name| name.starts_with("eval/") || name.starts_with("val/")) {
            journal.log(step, self.steps, &metrics)?;
        }
        if saves {
            self.save(journal)?;
        }
        Ok(())
    }

    /// Sample videos come with the first step, with every so many, and with the last.
    fn wants_samples(&self) -> bool {
        let every = self.loaded.config.sample_steps;
        let next = self.done + 1;
        every > 0 && (next.is_multiple_of(every) || next == self.steps || self.done == 0)
    }

    /// One process alone may leave a step in its middle; of several, all must do the same.
    fn may_stop_within_steps(&self) -> bool {
        self.strategy.communicator().world_size() == 1
    }

    /// Whether any rank was asked to stop: signals do not reach all of them at once.
    fn is_asked_to_stop(&self, interrupt: &Interrupt) -> Result<bool> {
        let mut asked = [f32::from(u8::from(interrupt.is_asked()))];
        self.strategy.communicator().all_reduce(&mut asked)?;
        Ok(asked[0] > 0.0)
    }

    /// Writes what a run leaves at its end.
    fn finish(self, dir: Option<&RunDir>) -> Result<Summary> {
        if let Some([found, computed]) = self.store.as_ref().map(Store::counts) {
            tracing::info!("encodings: {found} were kept from before, {computed} computed");
        }
        let figures = outcome::figures(&self.record, self.identity);
        let mut summary = Summary {
            steps: self.done,
            seconds: self.record.seconds,
            parameters: self.model.parameter_count(),
            first: record::restored(&self.record.first),
            last: record::restored(&self.record.last),
            skipped_samples: self.record.skipped_samples,
            skipped: self.record.skipped.clone(),
            skipped_updates: self.record.skipped_updates,
            clipped_updates: self.record.clipped_updates,
            adapter: self.saved.as_ref().map(state::adapter_files).unwrap_or_default(),
            figures,
            lines: outcome::lines(&self.record, self.identity),
            written: Vec::new(),
        };
        let Some(dir) = dir else { return Ok(summary) };
        let json = serde_json::to_value(&summary).map_err(|e| Error::Misuse(format!("writing the summary: {e}")))?;
        dir.write_summary(&json)?;
        summary.written = outcome::write(dir, &self.record, self.evaluator.as_ref(), self.identity)?;
        summary.written.extend(trajectories::written(dir).map(|path| ("trajectories", path)));
        Ok(summary)
    }

    /// Generates and scores the clips of `evaluation`, if there are any, and keeps what came of it.
    fn evaluate(&mut self, dir: Option<&RunDir>, interrupt: &Interrupt) -> Result<Option<Results>> {
        let may_stop = self.may_stop_within_steps();
        let Some(evaluator) = &mut self.evaluator else { return Ok(None) };
        match self.done {
            0 => tracing::info!("evaluating {} clips before training", evaluator.clips()),
            step => tracing::info!("evaluating {} clips after step {step}", evaluator.clips()),
        }
        let bar = Bar::new(evaluator.clips() as u64, "clips", self.strategy.communicator().rank().0 == 0);
        let bar = bar.stopping(may_stop.then_some(interrupt));
        let reward = self.reward.as_deref_mut();
        let generated = evaluator.run(self.algorithm.as_mut(), self.model.as_mut(), reward, &self.noise, &bar)?;
        bar.finish();
        let Some(generated) = generated else { return Ok(None) };
        let results = evaluation::results(&generated);
        if let Some(dir) = dir {
            let moments = match (self.done, self.done == self.steps) {
                (0, _) => vec!["before".to_string()],
                (step, true) => vec!["after".into(), step_name(step)],
                (step, false) => vec![step_name(step)],
            };
            for moment in moments {
                outcome::save_clips(dir, &moment, &generated, self.identity)?;
            }
            if self.done == 0 {
                outcome::save_references(dir, evaluator, self.identity)?;
            }
        }
        self.record.evaluations.push(Evaluation { step: self.done, results: results.clone() });
        Ok(Some(results))
    }

    /// Lets the model do what it is trained for, if the algorithm has such a notion; returns the metrics.
    fn validate(&mut self, journal: &mut Journal, bar: &Bar) -> Result<BTreeMap<String, f64>> {
        let found = self.algorithm.validate(self.done, self.model.as_mut(), &self.noise, bar)?;
        let Some(Validation { metrics, records }) = found else { return Ok(BTreeMap::new()) };
        journal.keep(records)?;
        self.record.validations.push(Validated { step: self.done, metrics: record::stored(&metrics) });
        Ok(metrics)
    }

    fn step(&mut self, step: u64, want_videos: bool, bar: &Bar) -> Result<(StepReport, f64)> {
        let learning_rate = self.schedule.at(step);
        let batch = match &mut self.data {
            Some(data) => data.batch(step)?,
            None => Batch::default(),
        };
        let mut context = StepContext {
            step,
            samples: &batch.samples,
            model: self.model.as_mut(),
            reward: match &mut self.reward {
                Some(reward) => Some(reward.as_mut()),
                None => None,
            },
            strategy: self.strategy.as_mut(),
            learning_rate,
            noise: &self.noise,
            progress: bar,
            want_videos,
        };
        let mut report = self.algorithm.step(&mut context).while_doing(|| format!("step {}", step + 1))?;
        let skipped = communicator::join(self.strategy.communicator(), &batch.skipped)?;
        report.skipped.extend(skipped.into_iter().flatten());
        Ok((report, learning_rate))
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
