//! Prefetched rollouts: episodes are played while the step before them trains.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use roll_core::{Environment, Error, LanguageModel, Noise, Result, Silent};
use serde::{Deserialize, Serialize};

use super::{EpisodePlan, play};
use crate::agentic_ppo::config::AgenticPpoConfig;
use crate::agentic_ppo::episode::Episode;

type Environments = Vec<Box<dyn Environment>>;

/// A rollout that was played before its step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrefetchedRollout {
    /// The step that trains on it, from 0.
    pub step: u64,
    /// Its episodes.
    pub episodes: Vec<Episode>,
}

/// The environments of a rank, and the rollout that they play ahead of its step, if any. Episodes depend on the policy
/// and the plan alone, not on the duration of the update.
#[derive(Default)]
pub struct Prefetcher(Mutex<PrefetchState>);

#[derive(Default)]
struct PrefetchState {
    environments: Environments,
    thread: Option<JoinHandle<(Environments, Result<PrefetchedRollout>)>>,
    played: Option<Result<PrefetchedRollout>>,
    /// The prefetched rollout that the current step trains on.
    taken: Option<PrefetchedRollout>,
}

impl Prefetcher {
    /// Makes a prefetcher with these environments; nothing is played yet.
    pub fn new(environments: Environments) -> Self {
        Self(Mutex::new(PrefetchState { environments, ..PrefetchState::default() }))
    }

    /// Plays `plan` with `policy` on a thread of its own.
    pub fn begin(
        &mut self,
        config: &AgenticPpoConfig,
        plan: EpisodePlan,
        mut policy: Box<dyn LanguageModel + Send>,
        noise: &Noise,
    ) -> Result<()> {
        let mut state = self.finished();
        let mut environments = std::mem::take(&mut state.environments);
        let (config, noise) = (config.clone(), noise.clone());
        let work = move || {
            let episodes = play(&config, plan, policy.as_mut(), &mut environments, &noise, &Silent);
            (environments, episodes.map(|episodes| PrefetchedRollout { step: plan.step, episodes }))
        };
        let thread = std::thread::Builder::new().name("rollout".into()).spawn(work);
        state.thread = Some(thread.map_err(Error::failed("a thread for the next rollout could not be started"))?);
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
    /// rollout that it began is played again.
    pub fn undo(&mut self, step: u64) {
        let mut state = self.finished();
        if let Some(taken) = state.taken.take().filter(|taken| taken.step == step) {
            state.played = Some(Ok(taken));
        }
    }

    /// The prefetched rollout, for a checkpoint; `None` if it failed, since it is then played again.
    pub fn played(&self) -> Option<PrefetchedRollout> {
        self.finished().played.as_ref()?.as_ref().ok().cloned()
    }

    /// Restores the rollout of a checkpoint.
    pub fn restore(&mut self, played: Option<PrefetchedRollout>) {
        self.finished().played = played.map(Ok);
    }

    /// Waits for the rollout that is under way.
    fn finished(&self) -> MutexGuard<'_, PrefetchState> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = state.thread.take() {
            match thread.join() {
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
        drop(self.finished());
    }
}
