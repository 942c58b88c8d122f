//! Environments that language-model agents act in.

use crate::Result;

/// An observation of the agent.
#[derive(Clone, Debug, PartialEq)]
pub struct Observation {
    /// Text shown to the agent.
    pub text: String,
}

/// The consequence of an action.
#[derive(Clone, Debug, PartialEq)]
pub struct Transition {
    /// The next observation.
    pub observation: Observation,
    /// Reward of the action.
    pub reward: f64,
    /// Whether the task was solved or lost.
    pub terminated: bool,
    /// Whether a limit cut it off.
    pub truncated: bool,
    /// Whether the action was valid.
    pub valid: bool,
}

/// A text environment, deterministic given its seed and the actions.
pub trait Environment: Send {
    /// Starts anew.
    fn reset(&mut self, seed: u64) -> Result<Observation>;
    /// Applies the agent's text.
    fn step(&mut self, action: &str) -> Result<Transition>;

    /// The task and what the agent may answer; shown once, before the first observation. Empty when observations say
    /// it all.
    fn instructions(&self) -> String {
        String::new()
    }

    /// Names of the worlds that it has, where it has several: `reset` with seed s opens world `s % count`. Empty: it is
    /// one world.
    fn kinds(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether the task is solved as it stands. `None`: the environment does not tell, and an episode counts as solved
    /// when it terminated with a positive reward.
    fn solved(&self) -> Option<bool> {
        None
    }
}
