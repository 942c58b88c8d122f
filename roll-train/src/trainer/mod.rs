//! The training loop: batches in, metrics, samples and checkpoints out.

mod hacking;
mod idle;
mod measure;
mod open;
mod overview;
mod pace;
mod parameters;
mod state;
mod summary;
mod tensors;

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
use crate::config::LoadedConfig;
use crate::evaluation::Evaluator;
use crate::on_finish::OnFinish;
use crate::progress::{RunSession, Watch};
use crate::results::record::{self, Record};
use crate::results::{self, Journal, SetLabels};
use crate::run_dir::RunDir;
use crate::sample_prompts::SamplePrompts;

pub use open::reward;
pub use overview::epochs;
pub use summary::RunSummary;

/// Prompts that are announced to a model before it encodes them.
const EXPECTED_PROMPTS: usize = 64;

/// Everything a run consists of, checked before anything is written.
pub struct Trainer {
    loaded: LoadedConfig,
    model: Box<dyn Model>,
    reward: Option<Box<dyn RewardScorer>>,
    algorithm: Box<dyn Algorithm>,
    strategy: Box<dyn Strategy>,
    /// `None`: the algorithm brings its own.
    data: Option<Batches>,
    evaluator: Option<Evaluator>,
    /// Videos of `evaluation.prompts`.
    prompts: Option<SamplePrompts>,
    /// The algorithm has something to validate on.
    validates: bool,
    /// The store of encodings in `data.cache_dir`.
    store: Option<CacheStore>,
    schedule: LrSchedule,
    noise: Noise,
    /// Names of the sets of evaluations.
    labels: SetLabels,
    /// The metrics to show first.
    headlines: Vec<Headline>,
    steps: u64,
    /// Steps that are done, also before this process.
    done: u64,
    /// The work until now.
    record: Record,
    /// Seconds of the processes before this one.
    seconds_before: f64,
    /// The newest checkpoint that this process wrote or went on from; only rank 0 writes.
    saved: Option<Checkpoint>,
    /// Its step, which every rank must know: whether one is to be written is decided by all alike.
    saved_step: Option<u64>,
    /// The reason that the run ended before its last step, in words.
    stopped: Option<String>,
    pace: pace::Pace,
}

impl Trainer {
    /// Trains, writing to `dir`, which only rank 0 has. The files that the run needs to go on are there before its
    /// first evaluation; a mistake of the user that shows before the first step is done leaves nothing. When the
    /// session asks it to stop, it ends with [`Error::Interrupted`], after a checkpoint.
    pub fn run(self, dir: Option<&RunDir>, session: &RunSession) -> Result<RunSummary> {
        let on_finish = OnFinish::new(&self.loaded.config.on_finish, dir.map(RunDir::path));
        let (done, outcome) = self.run_to_its_end(dir, session);
        if let Some(on_finish) = on_finish {
            on_finish.tell(done, &outcome);
        }
        outcome
    }

    /// Gives the number of steps done as well.
    fn run_to_its_end(mut self, dir: Option<&RunDir>, session: &RunSession) -> (u64, Result<RunSummary>) {
        let bar = Watch::begin(session, self.steps, "steps", dir.is_some(), self.may_stop_within_steps());
        bar.set(self.done);
        let mut journal = Journal::new(dir, self.done, self.headlines.clone());
        let start = Instant::now();
        self.seconds_before = self.record.seconds;
        if let Some(dir) = dir {
            self.overview(dir).iter().for_each(|line| tracing::info!("{line}"));
        }
        let trained = journal.begin(&self.loaded).and_then(|()| self.train(&mut journal, session, &bar, start));
        bar.finish();
        self.record.seconds = self.seconds_before + start.elapsed().as_secs_f64();
        let outcome = match trained {
            Err(error) if error.fault() == Fault::Interrupt => self.stop(&mut journal).and(Err(Error::Interrupted)),
            Err(error) => {
                let discarded = match (dir, self.done, error.fault()) {
                    (Some(dir), 0, Fault::User) => dir.discard_beginning(),
                    _ => Ok(()),
                };
                discarded.and(Err(error))
            }
            Ok(()) => return (self.done, self.finish(dir)),
        };
        (self.done, outcome)
    }

    fn train(&mut self, journal: &mut Journal, session: &RunSession, bar: &Watch, start: Instant) -> Result<()> {
        if self.done == 0 {
            let begun = Instant::now();
            if self.record.evaluations.is_empty() {
                self.evaluate(journal.dir.as_ref(), session)?;
            }
            if self.record.validations.is_empty() {
                self.validate(journal, bar)?;
            }
            self.sample_prompts(journal.dir.as_ref(), session)?;
            self.pace.evaluated(begun.elapsed().as_secs_f64());
        }
        if let Some(metrics) = self.record.pending.clone() {
            journal.open(&self.loaded, &self.record, &self.labels)?;
            self.complete(journal, session, bar, record::restored(&metrics))?;
        }
        if self.record.parameters.is_none() {
            self.record.parameters = parameters::glance(self.model.as_mut())?.map(|glance| glance.hash);
        }
        while self.done < self.steps {
            self.stopped = self.hacked();
            if self.stopped.is_some() {
                self.end_early(journal)?;
                break;
            }
            if bar.is_asked_to_stop(self.strategy.ranks().all.as_ref())? {
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
            let glance = parameters::glance(self.model.as_mut())?;
            report.metrics.extend(glance.map(|glance| (parameters::NORM.to_string(), glance.norm)));
            let max_grad_norm = self.loaded.config.training.max_grad_norm;
            self.record.step(self.done, &report, max_grad_norm, glance.map(|glance| glance.hash));
            journal.open(&self.loaded, &self.record, &self.labels)?;
            report.metrics.insert("lr".into(), learning_rate);
            report.metrics.insert("time/total".into(), begun.elapsed().as_secs_f64());
            journal.tell(self.done, &report)?;
            let seconds = begun.elapsed().as_secs_f64();
            self.complete(journal, session, bar, report.metrics)?;
            bar.set(self.done);
            self.tell_pace(seconds, journal);
            let stopped = self.is_idle();
            if stopped.is_err() {
                self.rescue(journal);
            }
            stopped?;
        }
        self.is_idle()?;
        if let Some(told) = idle::warmed_up_alone(self.course()).filter(|_| journal.dir.is_some()) {
            tracing::warn!("{told}");
        }
        Ok(())
    }

    /// Says how long the rest takes, once the first steps are known.
    fn tell_pace(&mut self, seconds: f64, journal: &Journal) {
        let every = self.loaded.config.evaluation.every;
        let evaluations = if self.measures() { pace::evaluations_left(self.done, self.steps, every) } else { 0 };
        let told = self.pace.stepped(seconds, self.steps - self.done, evaluations);
        if let Some(told) = told.filter(|_| journal.dir.is_some()) {
            tracing::info!("{told}");
        }
    }

    /// Fails when nothing is trained.
    fn is_idle(&self) -> Result<()> {
        idle::check(&self.record, self.course())
    }

    fn course(&self) -> idle::Course {
        let training = &self.loaded.config.training;
        idle::Course {
            done: self.done,
            steps: self.steps,
            batch: self.data.as_ref().map_or(0, Batches::global_batch) as u64,
            limit: training.max_skipped_steps,
            warms_up: training.learning_rate > 0.0 && (0..self.done).all(|step| self.schedule.at(step) == 0.0),
        }
    }

    /// The work after a step: checkpoint, evaluation, metrics. The checkpoint comes first: a process that is killed in
    /// the evaluation does not do the steps before it again, and the next one goes on with the clips that are left.
    fn complete(
        &mut self,
        journal: &mut Journal,
        session: &RunSession,
        bar: &Watch,
        mut metrics: BTreeMap<String, f64>,
    ) -> Result<()> {
        let config = &self.loaded.config;
        let (step, last) = (self.done, self.done == self.steps);
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let (logs, evaluates, saves) =
            (due(config.logging_steps) || last, due(config.evaluation.every) || last, due(config.save_steps) || last);
        self.record.pending = Some(record::stored(&metrics));
        if saves && evaluates && self.measures() {
            self.save(journal)?;
        }
        if evaluates {
            let evaluated = self.evaluate(journal.dir.as_ref(), session);
            if evaluated.as_ref().is_err_and(|error| error.fault() != Fault::Interrupt) {
                self.rescue(journal);
            }
            if let Some(results) = evaluated? {
                metrics.extend(results::metrics(&results, &self.labels));
                metrics.extend(self.watch_checks());
            }
            let sampled = self.sample_prompts(journal.dir.as_ref(), session);
            if sampled.as_ref().is_err_and(|error| error.fault() != Fault::Interrupt) {
                self.rescue(journal);
            }
            sampled?;
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
            self.amend(journal)?;
        }
        Ok(())
    }

    /// Whether an evaluation takes time.
    fn measures(&self) -> bool {
        self.evaluator.is_some() || self.prompts.is_some() || self.validates
    }

    /// Sample videos are written with the first step, every `sample_steps`, and with the last.
    fn wants_samples(&self) -> bool {
        let every = self.loaded.config.sample_steps;
        let next = self.done + 1;
        every > 0 && (next.is_multiple_of(every) || next == self.steps || self.done == 0)
    }

    /// One process alone may leave a step in its middle; of several, all must do the same.
    fn may_stop_within_steps(&self) -> bool {
        self.strategy.ranks().all.world_size() == 1
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
        let skipped = communicator::join(self.strategy.ranks().data.as_ref(), &batch.skipped)?;
        let skipped: Vec<_> = skipped.into_iter().flatten().collect();
        if !skipped.is_empty() {
            report.metrics.insert("data/skipped".into(), skipped.len() as f64);
        }
        report.skipped.extend(skipped);
        Ok((report, learning_rate))
    }
}
