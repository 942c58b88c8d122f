//! The training loop: batches in, metrics, samples and checkpoints out.
//!
//! The trainer owns steps, strategy, checkpoints and stopping. What is trained on, and how it is measured, belongs to
//! its `Task`.
//!
//! `state` writes checkpoints, with the state of the task in `task_state`, and resumes from them. The loop itself is
//! here. Between steps, `pace` logs the remaining time, and `idle` stops a run in which nothing is trained. `average`
//! keeps averaged parameters. `overview` is logged at the start; `summary` is written at the end.

mod average;
mod idle;
mod overview;
mod pace;
mod state;
mod summary;
mod task_state;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use roll_backends::optimizer::LrSchedule;
use roll_core::{BuildContext, Error, Fault, Model, Noise, Registry, Result, StepContext, StepReport, Strategy};

use crate::checkpoint::Checkpoint;
use crate::config::LoadedConfig;
use crate::on_finish::OnFinish;
use crate::open::open_run;
use crate::parameters::{self, ParameterSums};
use crate::progress::{RunSession, StoppableBar};
use crate::results::Journal;
use crate::results::record::{self, Record};
use crate::run_dir::RunDir;
use crate::task::{Network, Task, TaskContext, TaskFacts};

pub use average::decay as average_decay;
pub use summary::RunSummary;

/// Everything a run consists of, checked before anything is written.
pub struct Trainer {
    loaded: LoadedConfig,
    model: Box<dyn Model>,
    strategy: Box<dyn Strategy>,
    task: Box<dyn Task>,
    schedule: LrSchedule,
    /// The averaged parameters as a flat vector; `None` without `training.average`.
    average: Option<Vec<f32>>,
    noise: Noise,
    /// Number of steps of the whole run.
    steps: u64,
    /// Number of steps that are done, by this process and by earlier ones.
    steps_done: u64,
    /// The course of the run so far, part of every checkpoint.
    record: Record,
    /// Seconds of training by the earlier processes of this run.
    seconds_before: f64,
    /// The newest checkpoint that this process wrote or resumed from. Ranks that do not write have only the checkpoint
    /// that they resumed from.
    saved: Option<Checkpoint>,
    /// The step of the newest checkpoint. Every rank has it, because all ranks must agree whether to write a
    /// checkpoint.
    saved_step: Option<u64>,
    /// As [`BuildContext::run_dir`].
    run_dir: Arc<OnceLock<PathBuf>>,
    /// The reason in words, if the run ended before its last step.
    early_stop_reason: Option<String>,
    pace: pace::Pace,
}

/// Work that may be due after a step.
enum Work {
    /// Write a checkpoint, unless this step has one.
    Save,
    /// Let the task measure.
    Measure,
    /// Log the metrics of the step. If `always` is false, only if the task has measured something.
    Log { always: bool },
    /// Add the measurements to the checkpoint of this step, if the checkpoint was written before the measurements.
    Amend,
}

impl Trainer {
    /// Opens data and networks, on the ranks of `context`. If [`crate::config::RunConfig::ranks`] is above 1, each rank
    /// must call this within [`crate::ranks::run`].
    pub fn new(loaded: LoadedConfig, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let (Network { model, strategy }, task) = open_run(&loaded, registry, context)?;
        let (config, steps) = (&loaded.config, task.facts().steps);
        let average = match config.training.average > 0.0 {
            true => Some(roll_core::flat::read(model.as_ref())?),
            false => None,
        };
        Ok(Self {
            average,
            noise: config.noise(),
            schedule: config.training.schedule(steps),
            loaded,
            model,
            strategy,
            task,
            steps,
            steps_done: 0,
            record: Record::default(),
            seconds_before: 0.0,
            saved: None,
            saved_step: None,
            run_dir: context.run_dir.clone(),
            early_stop_reason: None,
            pace: Default::default(),
        })
    }

    /// Trains, and runs the command of `on_finish`. Rank 0 writes to `dir`; other ranks pass `None`.
    ///
    /// The files that a resume needs are written before the first evaluation. They are removed again if the run fails
    /// by a mistake of the user before the end of its first step. If the session asks the run to stop, it writes a
    /// checkpoint and ends with [`Error::Interrupted`].
    pub fn run(self, dir: Option<&RunDir>, session: &RunSession) -> Result<RunSummary> {
        let on_finish = OnFinish::new(&self.loaded.config.on_finish, dir.map(RunDir::path));
        let (steps_done, outcome) = self.run_to_end(dir, session);
        if let Some(on_finish) = on_finish {
            on_finish.run(steps_done, &outcome);
        }
        outcome
    }

    /// Trains and writes the results. Returns the number of steps that are done, and the outcome.
    fn run_to_end(mut self, dir: Option<&RunDir>, session: &RunSession) -> (u64, Result<RunSummary>) {
        let bar = StoppableBar::begin(session, self.steps, "steps", dir.is_some(), self.may_stop_within_steps());
        bar.set(self.steps_done);
        let TaskFacts { headlines, labels, .. } = self.task.facts().clone();
        let mut journal = Journal::new(dir, self.steps_done, headlines, labels);
        let start = Instant::now();
        self.seconds_before = self.record.seconds;
        if let Some(dir) = dir {
            self.run_dir.get_or_init(|| dir.path().into());
            self.overview(dir).iter().for_each(|line| tracing::info!("{line}"));
        }
        let training = journal.begin(&self.loaded).and_then(|()| self.train(&mut journal, session, &bar, start));
        bar.finish();
        self.record.seconds = self.seconds_before + start.elapsed().as_secs_f64();
        let steps_done = self.steps_done;
        let outcome = match training {
            Ok(()) => self.finish(dir),
            Err(error) if error.fault() == Fault::Interrupt => self.stop(&mut journal).and(Err(Error::Interrupted)),
            // A run that failed by a mistake of the user before its first step was done leaves no directory.
            Err(error) => match dir {
                Some(dir) if steps_done == 0 && error.fault() == Fault::User => dir.discard_beginning().and(Err(error)),
                _ => Err(error),
            },
        };
        (steps_done, outcome)
    }

    /// The training loop: measures before training, takes the remaining steps, and ends the task. `start` is the time
    /// at which this process began to train.
    fn train(&mut self, journal: &mut Journal, session: &RunSession, bar: &StoppableBar, start: Instant) -> Result<()> {
        if self.steps_done == 0 {
            let measure_start = Instant::now();
            self.with_average(|trainer| trainer.measure(journal, session, bar))?;
            self.pace.add_evaluation(measure_start.elapsed().as_secs_f64());
        }
        // A resumed run whose last step is saved but not logged: the earlier process was stopped during the evaluation
        // after it. The remaining work of that step is done now.
        if let Some(metrics) = self.record.pending.clone() {
            journal.open(&self.loaded, &self.record)?;
            self.complete(journal, session, bar, record::restored(&metrics))?;
        }
        // `add_step` compares the hash after a step with the one before it, to see whether the step changed a
        // parameter.
        if self.record.parameters_hash.is_none() {
            self.record.parameters_hash = ParameterSums::of(self.model.as_mut())?.map(|sums| sums.hash);
        }
        while self.steps_done < self.steps {
            self.early_stop_reason = self.task.stop_reason(&self.record, self.steps_done);
            if self.early_stop_reason.is_some() {
                self.end_early(journal)?;
                break;
            }
            if bar.is_asked_to_stop(self.strategy.ranks().all.as_ref())? {
                return Err(Error::Interrupted);
            }
            self.train_step(journal, session, bar, start)?;
        }
        // Checked here too, because a resumed run may have no step left. If it failed this check after its last step,
        // it must fail again.
        self.check_idle()?;
        let is_first_rank = journal.dir.is_some();
        if is_first_rank && let Some(note) = idle::warmup_note(self.training_progress()) {
            tracing::warn!("{note}");
        }
        let is_early = self.early_stop_reason.is_some();
        self.with_task(journal, session, bar, |task, context| task.end(context, is_early))
    }

    /// Takes the next step, does the work that is due after it, and checks whether the run trains anything. `start` is
    /// the time at which this process began to train.
    fn train_step(
        &mut self,
        journal: &mut Journal,
        session: &RunSession,
        bar: &StoppableBar,
        start: Instant,
    ) -> Result<()> {
        let step_start = Instant::now();
        let report = self.step(journal.dir.is_some() && self.wants_samples(), bar);
        let mut report = self.checkpoint_on_error(report, journal)?;
        self.steps_done += 1;
        self.update_average()?;
        self.record.seconds = self.seconds_before + start.elapsed().as_secs_f64();
        let sums = ParameterSums::of(self.model.as_mut())?;
        report.metrics.extend(sums.map(|sums| (parameters::NORM.to_string(), sums.norm())));
        let max_grad_norm = self.loaded.config.training.max_grad_norm;
        self.record.add_step(self.steps_done, &report, max_grad_norm, sums.map(|sums| sums.hash));
        // Only the first call has an effect: it opens the metrics, and removes the metrics of steps that earlier
        // processes did after their last checkpoint.
        journal.open(&self.loaded, &self.record)?;
        report.metrics.insert("time/total".into(), step_start.elapsed().as_secs_f64());
        journal.write_report(self.steps_done, &report)?;
        let seconds = step_start.elapsed().as_secs_f64();
        self.complete(journal, session, bar, report.metrics)?;
        bar.set(self.steps_done);
        self.log_pace(seconds, journal);
        let idle_check = self.check_idle();
        self.checkpoint_on_error(idle_check, journal)
    }

    /// Writes a checkpoint with the measurements so far, for a run that ends early.
    fn end_early(&mut self, journal: &mut Journal) -> Result<()> {
        // The journal is not open yet if this process resumed a run that ends without a further step.
        journal.open(&self.loaded, &self.record)?;
        self.save(journal)?;
        self.add_late_measurements(journal)
    }

    /// Logs the remaining time, once this process has timed its first steps. `seconds` is the time of the last step.
    fn log_pace(&mut self, seconds: f64, journal: &Journal) {
        let TaskFacts { measures: has_evaluations, measured_every, .. } = *self.task.facts();
        let evaluations_left =
            if has_evaluations { pace::evaluations_left(self.steps_done, self.steps, measured_every) } else { 0 };
        let message = self.pace.add_step(seconds, self.steps - self.steps_done, evaluations_left);
        let is_first_rank = journal.dir.is_some();
        if let Some(message) = message
            && is_first_rank
        {
            tracing::info!("{message}");
        }
    }

    /// Fails if the run trains nothing, see [`idle::check`].
    fn check_idle(&self) -> Result<()> {
        idle::check(&self.record, self.training_progress())
    }

    /// The progress of the run, by which [`idle`] judges whether it trains.
    fn training_progress(&self) -> idle::RunProgress {
        let training = &self.loaded.config.training;
        let had_no_rate = (0..self.steps_done).all(|step| self.schedule.at(step) == 0.0);
        idle::RunProgress {
            steps_done: self.steps_done,
            steps: self.steps,
            samples_per_step: self.task.facts().samples_per_step,
            max_idle_steps: training.max_skipped_steps,
            hint: self.task.facts().idle_hint,
            is_warming_up: training.learning_rate > 0.0 && had_no_rate,
        }
    }

    /// Does the work that is due after a step, whose metrics are `metrics`.
    fn complete(
        &mut self,
        journal: &mut Journal,
        session: &RunSession,
        bar: &StoppableBar,
        mut metrics: BTreeMap<String, f64>,
    ) -> Result<()> {
        let mut has_measured = false;
        // Until the metrics are logged they are in the record, so that a process that resumes in between can log them.
        self.record.pending = Some(record::stored(&metrics));
        for work in self.due_work() {
            match work {
                Work::Save => self.save(journal)?,
                Work::Measure => {
                    let measurements = self.with_average(|trainer| trainer.measure(journal, session, bar));
                    let measurements = self.checkpoint_on_error(measurements, journal)?;
                    has_measured = !measurements.is_empty();
                    metrics.extend(measurements);
                }
                Work::Log { always } => {
                    self.record.pending = None;
                    self.record.set_last(&metrics);
                    if always || has_measured {
                        journal.log(self.steps_done, self.steps, &metrics)?;
                    }
                    if has_measured {
                        journal.write_progress(&self.record)?;
                    }
                }
                Work::Amend => self.add_late_measurements(journal)?,
            }
        }
        Ok(())
    }

    /// The work that is due after step `steps_done`, in its order.
    fn due_work(&self) -> Vec<Work> {
        let (config, facts) = (&self.loaded.config, self.task.facts());
        let is_due = |every: u64| self.steps_done == self.steps || (every > 0 && self.steps_done.is_multiple_of(every));
        let (should_measure, should_save) = (is_due(facts.measured_every), is_due(config.save_steps));
        let mut work = Vec::new();
        // The checkpoint comes before an evaluation. After a kill during the evaluation, the next process then repeats
        // no step, and continues with the clips that are not evaluated yet.
        if should_save && should_measure && facts.measures {
            work.push(Work::Save);
        }
        if should_measure {
            work.push(Work::Measure);
        }
        work.push(Work::Log { always: is_due(config.logging_steps) });
        // After an evaluation, the step has its checkpoint: this `Save` does nothing, and `Amend` adds the evaluation.
        // Without an evaluation, this `Save` writes the checkpoint, and `Amend` has nothing to add.
        if should_save {
            work.extend([Work::Save, Work::Amend]);
        }
        work
    }

    /// Lets the task measure, and returns the metrics.
    fn measure(
        &mut self,
        journal: &mut Journal,
        session: &RunSession,
        bar: &StoppableBar,
    ) -> Result<BTreeMap<String, f64>> {
        self.with_task(journal, session, bar, |task, context| task.measure(context))
    }

    /// Runs `work` with the task and the context that the trainer lends it.
    fn with_task<T>(
        &mut self,
        journal: &mut Journal,
        session: &RunSession,
        bar: &StoppableBar,
        work: impl FnOnce(&mut dyn Task, &mut TaskContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut context = TaskContext {
            config: &self.loaded.config,
            step: self.steps_done,
            model: self.model.as_mut(),
            ranks: self.strategy.ranks().all.as_ref(),
            noise: &self.noise,
            record: &mut self.record,
            journal,
            session,
            bar,
        };
        work(self.task.as_mut(), &mut context)
    }

    /// Whether the next step writes sample videos: the first step, every `sample_steps`-th one, and the last.
    fn wants_samples(&self) -> bool {
        let every = self.loaded.config.sample_steps;
        let next_step = self.steps_done + 1;
        every > 0 && (next_step.is_multiple_of(every) || next_step == self.steps || next_step == 1)
    }

    /// Whether the run may stop within a step. Several ranks must all stop at the same point, and so between steps.
    fn may_stop_within_steps(&self) -> bool {
        self.strategy.ranks().all.world_size() == 1
    }

    /// Takes one step.
    fn step(&mut self, want_videos: bool, bar: &StoppableBar) -> Result<StepReport> {
        let learning_rate = self.schedule.at(self.steps_done);
        let mut context = StepContext {
            step: self.steps_done,
            samples: &[],
            model: self.model.as_mut(),
            reward: None,
            strategy: self.strategy.as_mut(),
            learning_rate,
            noise: &self.noise,
            progress: bar,
            want_videos,
        };
        let mut report = self.task.step(&mut context)?;
        report.metrics.insert("lr".into(), learning_rate);
        Ok(report)
    }
}
