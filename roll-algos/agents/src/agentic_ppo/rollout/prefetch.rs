//! Prefetched rollouts: episodes are played while the step before them trains.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use roll_core::{Environment, Error, LanguageModel, Noise, Progress, Result, threads};
use serde::{Deserialize, Serialize};

use super::{EpisodePlan, play};
use crate::agentic_ppo::config::AgenticPpoConfig;
use crate::agentic_ppo::episode::Episode;

/// How often it is looked whether a rollout is done.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

type Environments = Vec<Box<dyn Environment>>;

/// A rollout that was played before its step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrefetchedRollout {
    /// The step that trains on it, from 0.
    pub step: u64,
    /// Its episodes.
    pub episodes: Vec<Episode>,
}

/// A rollout that was under way when a checkpoint was written: a resume plays it again.
#[derive(Clone, Debug, PartialEq)]
pub struct UnplayedRollout {
    /// The step that trains on it, from 0.
    pub step: u64,
    /// Parameters of the policy that plays it.
    pub policy: Arc<Vec<f32>>,
}

/// What a checkpoint holds of the next step's rollout.
pub enum Ahead {
    /// It is played, or none was begun.
    Played(Option<PrefetchedRollout>),
    /// It is under way.
    UnderWay(UnplayedRollout),
}

/// The environments of a rank, and the rollout that they play ahead of its step, if any. Episodes depend on the policy
/// and the plan alone, not on the duration of the update.
#[derive(Default)]
pub struct Prefetcher(Mutex<PrefetchState>);

#[derive(Default)]
struct PrefetchState {
    environments: Environments,
    thread: Option<RunningRollout>,
    played: Option<Result<PrefetchedRollout>>,
    /// The prefetched rollout that the current step trains on.
    taken: Option<PrefetchedRollout>,
    /// The rollout that the latest checkpoint has to play again.
    unplayed: Option<UnplayedRollout>,
}

struct RunningRollout {
    thread: JoinHandle<(Environments, Result<PrefetchedRollout>)>,
    step: u64,
    /// Parameters of the policy, if a checkpoint may hold them.
    policy: Option<Arc<Vec<f32>>>,
    stop: Arc<AtomicBool>,
}

/// The progress of a rollout that is played ahead: shown nowhere, and stopped by a flag.
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

    /// Plays `plan` with `policy` on a thread of its own. With its `parameters`, a checkpoint does not wait for the
    /// end.
    pub fn begin(
        &mut self,
        config: &AgenticPpoConfig,
        plan: EpisodePlan,
        mut policy: Box<dyn LanguageModel + Send>,
        parameters: Option<Arc<Vec<f32>>>,
        noise: &Noise,
    ) -> Result<()> {
        let mut state = self.finished();
        let mut environments = std::mem::take(&mut state.environments);
        let (config, noise, stop) = (config.clone(), noise.clone(), Arc::new(AtomicBool::new(false)));
        let progress = Stoppable(Arc::clone(&stop));
        let work = move || {
            let episodes = play(&config, plan, policy.as_mut(), &mut environments, &noise, &progress);
            (environments, episodes.map(|episodes| PrefetchedRollout { step: plan.step, episodes }))
        };
        let thread = threads::spawn("a rollout", work).map_err(Error::failed("the next rollout cannot be played"))?;
        state.thread = Some(RunningRollout { thread, step: plan.step, policy: parameters, stop });
        Ok(())
    }

    /// Waits until no rollout needs the environments. An interrupt ends the wait, and the rollout goes on.
    pub fn wait(&self, progress: &dyn Progress) -> Result<()> {
        while self.lock().thread.as_ref().is_some_and(|running| !running.thread.is_finished()) {
            if progress.interrupted() {
                return Err(Error::Interrupted);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// The environments, once no rollout needs them.
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

    /// Undoes a failed step, which will be repeated. If it had taken its rollout, it gets the same episodes again; the
    /// rollout that it began is stopped, and played again.
    pub fn undo(&mut self, step: u64) {
        let began_next = self.lock().thread.as_ref().is_some_and(|running| running.step > step);
        let taken = self.lock().taken.take().filter(|taken| taken.step == step);
        if began_next || taken.is_some() {
            self.stop();
            self.finished().played = taken.map(Ok);
        }
    }

    /// The state of the next step's rollout, for a checkpoint. A rollout that failed is played again.
    pub fn ahead(&self) -> Ahead {
        let mut state = self.lock();
        let under_way = state.thread.as_ref().filter(|running| !running.thread.is_finished());
        state.unplayed = match under_way.and_then(|running| Some((running.step, running.policy.clone()?))) {
            Some((step, policy)) => Some(UnplayedRollout { step, policy }),
            // The one of the checkpoint that was loaded, until it is begun.
            None if state.thread.is_none() && state.played.is_none() => state.unplayed.take(),
            None => None,
        };
        if let Some(unplayed) = state.unplayed.clone() {
            return Ahead::UnderWay(unplayed);
        }
        drop(state);
        Ahead::Played(self.finished().played.as_ref().and_then(|played| played.as_ref().ok().cloned()))
    }

    /// Whether a rollout is under way or played.
    pub fn has_rollout(&self) -> bool {
        let state = self.lock();
        state.thread.is_some() || state.played.is_some()
    }

    /// The rollout that the latest checkpoint, written or loaded, has to play again.
    pub fn unplayed(&self) -> Option<UnplayedRollout> {
        self.lock().unplayed.clone()
    }

    /// Restores the rollout of a checkpoint.
    pub fn restore(&mut self, ahead: Ahead) {
        let mut state = self.finished();
        (state.played, state.unplayed) = match ahead {
            Ahead::Played(played) => (played.map(Ok), None),
            Ahead::UnderWay(unplayed) => (None, Some(unplayed)),
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

    /// Waits for the rollout that is under way.
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
    /// Environments that are processes are ended by their owner, which the thread is until it is done.
    fn drop(&mut self) {
        self.stop();
        drop(self.finished());
    }
}
