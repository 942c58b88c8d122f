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
    /// Seconds of the earlier processes of this run.
    seconds_before: f64,
    /// The newest checkpoint that this process wrote or resumed from. Ranks that do not write have only the checkpoint
    /// that they resumed from.
    saved: Option<Checkpoint>,
    /// The step of the newest checkpoint. Every rank has it, because all ranks must agree whether to write a
    /// checkpoint.
    saved_step: Option<u64>,
    /// [`BuildContext::run_dir`](roll_core::BuildContext::run_dir).
    run_dir: Arc<OnceLock<PathBuf>>,
    /// The reason in words, if the run ended before its last step.
    stopped: Option<String>,
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
    /// Add the measurements to the checkpoint of this step, if it was written before them.
    Amend,
}

impl Trainer {
    /// Opens data and networks, on the ranks of `context`. If [`crate::config::RunConfig::ranks`] is above 1, each rank
    /// must call this within [`crate::ranks::run`].
    pub fn new(loaded: LoadedConfig, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let (Network { model, strategy }, task) = open_run(&loaded, registry, context)?;
        let (config, steps) = (&loaded.config, task.facts().steps);
        Ok(Self {
            average: (config.training.average > 0.0).then(|| roll_core::flat::read(model.as_ref())).transpose()?,
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
            stopped: None,
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
        let (done, outcome) = self.run_to_end(dir, session);
        if let Some(on_finish) = on_finish {
            on_finish.run(done, &outcome);
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
        let trained = journal.begin(&self.loaded).and_then(|()| self.train(&mut journal, session, &bar, start));
        bar.finish();
        self.record.seconds = self.seconds_before + start.elapsed().as_secs_f64();
        let outcome = match trained {
            Err(error) if error.fault() == Fault::Interrupt => self.stop(&mut journal).and(Err(Error::Interrupted)),
            // A run that failed by a mistake of the user before its first step was done leaves no directory.
            Err(error) => {
                let discarded = match (dir, self.steps_done, error.fault()) {
                    (Some(dir), 0, Fault::User) => dir.discard_beginning(),
                    _ => Ok(()),
                };
                discarded.and(Err(error))
            }
            Ok(()) => return (self.steps_done, self.finish(dir)),
        };
        (self.steps_done, outcome)
    }

    /// The training loop: measures before training, takes the remaining steps, and ends the task.
    fn train(&mut self, journal: &mut Journal, session: &RunSession, bar: &StoppableBar, start: Instant) -> Result<()> {
        if self.steps_done == 0 {
            let begun = Instant::now();
            self.with_average(|trainer| trainer.measure(journal, session, bar))?;
            self.pace.add_evaluation(begun.elapsed().as_secs_f64());
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
            self.stopped = self.task.stop_reason(&self.record, self.steps_done);
            if self.stopped.is_some() {
                self.end_early(journal)?;
                break;
            }
            if bar.is_asked_to_stop(self.strategy.ranks().all.as_ref())? {
                return Err(Error::Interrupted);
            }
            let begun = Instant::now();
            let stepped = self.step(journal.dir.is_some() && self.wants_samples(), bar);
            let mut report = self.checkpoint_on_error(stepped, journal)?;
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
            report.metrics.insert("time/total".into(), begun.elapsed().as_secs_f64());
            journal.write_report(self.steps_done, &report)?;
            let seconds = begun.elapsed().as_secs_f64();
            self.complete(journal, session, bar, report.metrics)?;
            bar.set(self.steps_done);
            self.log_pace(seconds, journal);
            let checked = self.check_idle();
            self.checkpoint_on_error(checked, journal)?;
        }
        // Checked here too, because a resumed run may have no step left. If it failed this check after its last step,
        // it must fail again.
        self.check_idle()?;
        let is_first_rank = journal.dir.is_some();
        if is_first_rank && let Some(note) = idle::warmup_note(self.training_progress()) {
            tracing::warn!("{note}");
        }
        let is_early = self.stopped.is_some();
        self.with_task(journal, session, bar, |task, context| task.end(context, is_early))
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
        let TaskFacts { measures, measured_every, .. } = *self.task.facts();
        let evaluations =
            if measures { pace::evaluations_left(self.steps_done, self.steps, measured_every) } else { 0 };
        let message = self.pace.add_step(seconds, self.steps - self.steps_done, evaluations);
        let is_first_rank = journal.dir.is_some();
        if let Some(message) = message
            && is_first_rank
        {
            tracing::info!("{message}");
        }
    }

    fn check_idle(&self) -> Result<()> {
        idle::check(&self.record, self.training_progress())
    }

    /// The progress of the run, by which [`idle`] judges whether it trains.
    fn training_progress(&self) -> idle::RunProgress {
        let training = &self.loaded.config.training;
        idle::RunProgress {
            done: self.steps_done,
            steps: self.steps,
            batch: self.task.facts().samples_per_step,
            limit: training.max_skipped_steps,
            hint: self.task.facts().idle_hint,
            warms_up: training.learning_rate > 0.0 && (0..self.steps_done).all(|step| self.schedule.at(step) == 0.0),
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
        for work in self.due() {
            match work {
                Work::Save => self.save(journal)?,
                Work::Measure => {
                    let measured = self.with_average(|trainer| trainer.measure(journal, session, bar));
                    let measured = self.checkpoint_on_error(measured, journal)?;
                    has_measured = !measured.is_empty();
                    metrics.extend(measured);
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
    fn due(&self) -> Vec<Work> {
        let config = &self.loaded.config;
        let due = |every: u64| self.steps_done == self.steps || (every > 0 && self.steps_done.is_multiple_of(every));
        let (measures, saves) = (due(self.task.facts().measured_every), due(config.save_steps));
        let work = [
            // The checkpoint comes before an evaluation. After a kill during the evaluation, the next process then
            // repeats no step, and continues with the clips that are not evaluated yet.
            (saves && measures && self.task.facts().measures, Work::Save),
            (measures, Work::Measure),
            (true, Work::Log { always: due(config.logging_steps) }),
            // After an evaluation, the step has its checkpoint: this `Save` does nothing, and `Amend` adds the
            // evaluation. Without an evaluation, this `Save` writes the checkpoint, and `Amend` has nothing to add.
            (saves, Work::Save),
            (saves, Work::Amend),
        ];
        work.into_iter().filter(|(is_due, _)| *is_due).map(|(_, work)| work).collect()
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
        let next = self.steps_done + 1;
        every > 0 && (next.is_multiple_of(every) || next == self.steps || self.steps_done == 0)
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
