//! [`Environment`] across the boundary.

use super::object::{Gift, Remote};
use super::remote::remote;
use crate::{Environment, Observation, Split, Transition};

remote! {
    trait Environment for RemoteEnvironment {
        fn reset(&mut self, seed: u64) -> Result<Observation>;
        fn step(&mut self, action: &str) -> Result<Transition>;
        fn enter(&mut self, split: Split, number: u64) -> Result<()> { Ok(()) }
        fn leave(&mut self) -> Result<()> { Ok(()) }
        fn instructions(&self) -> String { String::new() }
        fn kinds(&self) -> Vec<String> { Vec::new() }
        fn solved(&self) -> Option<bool> { None }
        fn action(&self) -> String { String::new() }
    }
}

/// An environment of the other side.
pub(super) struct RemoteEnvironment {
    pub(super) remote: Remote,
}

/// Hands over an environment; calls reach it by the generated `answer`.
pub(super) fn give(mut environment: Box<dyn Environment>) -> Gift {
    Gift::exclusive(move |method, message| answer(environment.as_mut(), method, message))
}
