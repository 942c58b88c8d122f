//! Prefetched rollouts: the episodes of a step are played on a thread while the previous step trains.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use roll_core::{Environment, Error, LanguageModel, Noise, Progress, Result, threads};
use serde::{Deserialize, Serialize};

use super::{EpisodePlan, Writer, play};
use crate::agentic_ppo::config::AgenticPpoConfig;
use crate::agentic_ppo::engine::Engine;
use crate::agentic_ppo::episode::Episode;

/// Interval at which a wait checks whether the rollout is done.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

type Environments = Vec<Box<dyn Environment>>;

/// A rollout that was played before its step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrefetchedRollout {
    /// The step that trains on it, from 0.
    pub step: u64,
    /// The episodes of the rollout.
    pub episodes: Vec<Episode>,
}

/// A rollout that was under way when a checkpoint was written. A resume plays it again.
#[derive(Clone, Debug, PartialEq)]
pub struct UnplayedRollout {
    /// The step that trains on it, from 0.
    pub step: u64,
    /// Parameters of the policy that plays it.
    pub policy: Arc<Vec<f32>>,
}

/// The next step's rollout, as a checkpoint holds it.
pub enum NextRollout {
    /// The rollout was played; `None` if none was begun.
    Played(Option<PrefetchedRollout>),
    /// The rollout is under way.
    UnderWay(UnplayedRollout),
}

/// The environments of a rank, and the rollout that they play ahead of its step, if any. Episodes depend only on the
/// policy and the plan, not on how long the update takes.
#[derive(Default)]
pub struct Prefetcher(Mutex<PrefetchState>);

#[derive(Default)]
struct PrefetchState {
    /// The environments; empty while a rollout is under way, because its thread then has them.
    environments: Environments,
    /// The rollout that is under way.
    thread: Option<RunningRollout>,
    /// The rollout that was played and not yet taken.
    played: Option<Result<PrefetchedRollout>>,
    /// The prefetched rollout that the current step trains on.
    taken: Option<PrefetchedRollout>,
    /// The rollout that a resume from the latest checkpoint has to play again.
    unplayed: Option<UnplayedRollout>,
}

struct RunningRollout {
    thread: JoinHandle<(Environments, Result<PrefetchedRollout>)>,
    step: u64,
    /// Parameters of the policy, if a checkpoint may hold them.
    policy: Option<Arc<Vec<f32>>>,
    stop: Arc<AtomicBool>,
}

/// The progress of a prefetched rollout, which is not shown and is stopped by a flag.
struct Stoppable(Arc<AtomicBool>);

impl Progress for Stoppable {
    fn phase(&self, _phase: &str) {}

    fn interrupted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Prefetcher {
    /// Makes a prefetcher with these environments; nothing is played yet.
    pub fn new(environments: Environments) -> Self {
        Self(Mutex::new(PrefetchState { environments, ..PrefetchState::default() }))
    }

    /// Begins to play `plan` with `policy` on a thread of its own; an `engine` writes the answers if there is one. If the
    /// policy's `parameters` are given, a checkpoint saves them instead of waiting for the end of the rollout.
    pub fn begin(
        &mut self,
        config: &AgenticPpoConfig,
        plan: EpisodePlan,
        mut policy: Box<dyn LanguageModel + Send>,
        mut engine: Option<Engine>,
        parameters: Option<Arc<Vec<f32>>>,
        noise: &Noise,
    ) -> Result<()> {
        let mut state = self.finished();
        let mut environments = std::mem::take(&mut state.environments);
        let (config, noise, stop) = (config.clone(), noise.clone(), Arc::new(AtomicBool::new(false)));
        let progress = Stoppable(Arc::clone(&stop));
        let step = plan.step;
        let work = move || {
            let engine = engine.as_mut().map(|engine| engine as _);
            let mut writer = Writer { model: policy.as_mut(), engine };
            let episodes = play(&config, plan, &mut writer, &mut environments, &noise, &progress);
            (environments, episodes.map(|episodes| PrefetchedRollout { step, episodes }))
        };
        let thread = threads::spawn("a rollout", work).map_err(Error::failed("the next rollout cannot be played"))?;
        state.thread = Some(RunningRollout { thread, step, policy: parameters, stop });
        Ok(())
    }

    /// Waits until no rollout needs the environments. Fails if the user asks to stop, but does not end the rollout.
    pub fn wait(&self, progress: &dyn Progress) -> Result<()> {
        while self.lock().thread.as_ref().is_some_and(|running| !running.thread.is_finished()) {
            if progress.interrupted() {
                return Err(Error::Interrupted);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// The environments. Waits until no rollout needs them.
    pub fn environments(&mut self) -> &mut [Box<dyn Environment>] {
        drop(self.finished());
        &mut self.0.get_mut().unwrap_or_else(PoisonError::into_inner).environments
    }

    /// Takes the rollout that was played for `step`; `None` if no rollout was played for it.
    pub fn take(&mut self, step: u64) -> Result<Option<Vec<Episode>>> {
        let mut state = self.finished();
        state.taken = state.played.take().transpose()?.filter(|played| played.step == step);
        Ok(state.taken.as_ref().map(|played| played.episodes.clone()))
    }

    /// Undoes a failed step, which will be repeated. If the step had taken its rollout, it will get the same episodes
    /// again. If it had begun the rollout of the next step, that is stopped and will be played again.
    pub fn undo(&mut self, step: u64) {
        let began_next = self.lock().thread.as_ref().is_some_and(|running| running.step > step);
        let taken = self.lock().taken.take().filter(|taken| taken.step == step);
        if began_next || taken.is_some() {
            self.stop();
            self.finished().played = taken.map(Ok);
        }
    }

    /// The next step's rollout, for a checkpoint. Waits for a rollout that is under way, unless its parameters are
    /// known. A rollout that failed counts as not begun.
    pub fn next_rollout(&self) -> NextRollout {
        let mut state = self.lock();
        let under_way = state.thread.as_ref().filter(|running| !running.thread.is_finished());
        state.unplayed = match under_way.and_then(|running| Some((running.step, running.policy.clone()?))) {
            Some((step, policy)) => Some(UnplayedRollout { step, policy }),
            // Nothing was begun since a checkpoint was loaded: its rollout is still to be played.
            None if state.thread.is_none() && state.played.is_none() => state.unplayed.take(),
            None => None,
        };
        if let Some(unplayed) = state.unplayed.clone() {
            return NextRollout::UnderWay(unplayed);
        }
        drop(state);
        NextRollout::Played(self.finished().played.as_ref().and_then(|played| played.as_ref().ok().cloned()))
    }

    /// Whether a rollout is under way or played.
    pub fn has_rollout(&self) -> bool {
        let state = self.lock();
        state.thread.is_some() || state.played.is_some()
    }

    /// The rollout that a resume from the latest checkpoint, written or loaded, has to play again.
    pub fn unplayed(&self) -> Option<UnplayedRollout> {
        self.lock().unplayed.clone()
    }

    /// Restores the rollout of a checkpoint.
    pub fn restore(&mut self, rollout: NextRollout) {
        let mut state = self.finished();
        (state.played, state.unplayed) = match rollout {
            NextRollout::Played(played) => (played.map(Ok), None),
            NextRollout::UnderWay(unplayed) => (None, Some(unplayed)),
        };
    }

    /// Asks the rollout that is under way to end before its next turn.
    fn stop(&self) {
        if let Some(running) = &self.lock().thread {
            running.stop.store(true, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, PrefetchState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the rollout that is under way, and takes its environments and episodes from the thread.
    fn finished(&self) -> MutexGuard<'_, PrefetchState> {
        let mut state = self.lock();
        if let Some(running) = state.thread.take() {
            match running.thread.join() {
                Ok((environments, played)) => {
                    state.environments = environments;
                    state.played = Some(played);
                }
                Err(_) => {
                    let reason = "its thread panicked; the message is above";
                    state.played = Some(Err(Error::failed("the next rollout could not be played")(reason)));
                }
            }
        }
        state
    }
}

impl Drop for Prefetcher {
    /// Waits for the thread, because it owns the environments of a rollout, and only their owner ends environments that
    /// are processes.
    fn drop(&mut self) {
        self.stop();
        drop(self.finished());
    }
}
