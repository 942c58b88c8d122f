//! The training loop: batches in, metrics, samples and checkpoints out.

mod idle;
mod measure;
mod open;
mod state;
mod summary;

use std::collections::BTreeMap;
use std::time::Instant;

use roll_backends::optimizer::LrSchedule;
use roll_core::{
    Algorithm, Error, Fault, Headline, Model, Noise, Result, ResultExt, RewardScorer, StepContext, StepReport,
    Strategy, communicator,
};
use roll_data::{Batch, Batches};

use crate::cache::CacheStore;
use crate::checkpoint::Checkpoint;
use crate::config::Loaded;
use crate::evaluation::Evaluator;
use crate::progress::{Session, Watch};
use crate::results::record::{self, Record};
use crate::results::{self, Journal, SetLabels};
use crate::run_dir::RunDir;

pub use open::reward;
pub use summary::Summary;

/// Prompts that a model is told of before it is asked to encode them.
const EXPECTED_PROMPTS: usize = 64;

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
    store: Option<CacheStore>,
    schedule: LrSchedule,
    noise: Noise,
    /// What the sets of evaluations are called.
    labels: SetLabels,
    /// The metrics to show first.
    headlines: Vec<Headline>,
    steps: u64,
    /// Steps that are done, also before this process.
    done: u64,
    /// What was done until now.
    record: Record,
    /// Seconds of the processes before this one.
    seconds_before: f64,
    /// The newest checkpoint that this process wrote or went on from; only rank 0 writes.
    saved: Option<Checkpoint>,
    /// Its step, which every rank must know: whether one is to be written is decided by all alike.
    saved_step: Option<u64>,
}

impl Trainer {
    /// Trains, writing to `dir`, which only rank 0 has. Nothing is written before the first step is done. When the
    /// session asks it to stop, it ends with [`Error::Interrupted`], after a checkpoint.
    pub fn run(mut self, dir: Option<&RunDir>, session: &Session) -> Result<Summary> {
        let bar = Watch::begin(session, self.steps, "steps", dir.is_some(), self.may_stop_within_steps());
        bar.set(self.done);
        let mut journal = Journal::new(dir, self.done, self.headlines.clone());
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
        let trained = self.train(&mut journal, session, &bar, start);
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

    fn train(&mut self, journal: &mut Journal, session: &Session, bar: &Watch, start: Instant) -> Result<()> {
        if self.done == 0 && self.record.evaluations.is_empty() {
            self.evaluate(journal.dir.as_ref(), session)?;
        }
        if self.done == 0 && self.record.validations.is_empty() {
            self.validate(journal, bar)?;
        }
        if let Some(metrics) = self.record.pending.clone() {
            journal.open(&self.loaded, &self.record, &self.labels)?;
            self.complete(journal, session, bar, record::restored(&metrics))?;
        }
        while self.done < self.steps {
            if self.is_asked_to_stop(session)? {
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
            journal.open(&self.loaded, &self.record, &self.labels)?;
            report.metrics.insert("lr".into(), learning_rate);
            report.metrics.insert("time/total".into(), begun.elapsed().as_secs_f64());
            journal.tell(self.done, &report)?;
            self.complete(journal, session, bar, report.metrics)?;
            bar.set(self.done);
            let batch = self.data.as_ref().map_or(0, Batches::global_batch) as u64;
            idle::check(&self.record, self.done, batch, self.loaded.config.training.max_skipped_steps)?;
        }
        Ok(())
    }

    /// What follows a step: evaluation, metrics, checkpoint. Stopped in the evaluation, it is done again from its
    /// beginning by the process that goes on.
    fn complete(
        &mut self,
        journal: &mut Journal,
        session: &Session,
        bar: &Watch,
        mut metrics: BTreeMap<String, f64>,
    ) -> Result<()> {
        let config = &self.loaded.config;
        let (step, last) = (self.done, self.done == self.steps);
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let (logs, evaluates, saves) =
            (due(config.logging_steps) || last, due(config.evaluation.every) || last, due(config.save_steps) || last);
        self.record.pending = Some(record::stored(&metrics));
        if evaluates {
            let evaluated = self.evaluate(journal.dir.as_ref(), session);
            if evaluated.as_ref().is_err_and(|error| error.fault() != Fault::Interrupt) {
                self.rescue(journal);
            }
            if let Some(results) = evaluated? {
                metrics.extend(results::metrics(&results, &self.labels));
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
    fn is_asked_to_stop(&self, session: &Session) -> Result<bool> {
        let mut asked = [f32::from(u8::from(session.stop.is_asked()))];
        self.strategy.communicator().all_reduce(&mut asked)?;
        Ok(asked[0] > 0.0)
    }

    fn step(&mut self, step: u64, want_videos: bool, bar: &Watch) -> Result<(StepReport, f64)> {
        let learning_rate = self.schedule.at(step);
        let batch = match &mut self.data {
            Some(data) => {
                if let Some(model) = self.model.as_diffusion() {
                    model.expect_prompts(&data.prompts(step, EXPECTED_PROMPTS));
                }
                data.batch(step)?
            }
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
        let skipped: Vec<_> = skipped.into_iter().flatten().collect();
        if !skipped.is_empty() {
            report.metrics.insert("data/skipped".into(), skipped.len() as f64);
        }
        report.skipped.extend(skipped);
        Ok((report, learning_rate))
    }
}
