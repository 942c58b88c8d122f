//! [`Environment`] across the boundary.

use crate::abi::{RollEnvironmentTable, RollObject, RollTransition};

use super::crossing::crossing;
use super::foreign::ForeignObject;
use super::memory::{own_text, take_text};
use super::served::Served;
use super::source::Source;
use super::wire::Answer;
use crate::{Environment, Observation, Result, Split, Transition};

type Target = dyn Environment;

crossing! {
    Environment for ForeignEnvironment, table RollEnvironmentTable of Target {
        mut fn reset(seed: u64) -> Observation;
        mut fn step(action: &str) -> Transition;
        ref fn instructions() -> String, or String::new();
        ref fn solved() -> Option<bool>, or None;
        ref fn kinds() -> Vec<String>, or Vec::new(), absent Vec::new();
        mut fn enter(split: Split, number: u64), absent ();
        mut fn leave(), absent ();
        ref fn action() -> String, or String::new(), absent String::new();
    }
    by hand [] {}
}

pub(super) fn give(environment: Box<dyn Environment>) -> RollObject {
    Served::give(environment, &TABLE)
}

pub(super) type ForeignEnvironment = ForeignObject<RollEnvironmentTable>;

impl Answer for Transition {
    type Wire = RollTransition;
    fn give(self) -> RollTransition {
        RollTransition {
            observation: own_text(self.observation.text),
            reward: self.reward,
            terminated: self.terminated.into(),
            truncated: self.truncated.into(),
            valid: self.valid.into(),
        }
    }
    unsafe fn take(wire: RollTransition, _: &Source) -> Result<Self> {
        Ok(Self {
            // SAFETY: as the caller promises.
            observation: Observation { text: unsafe { take_text(wire.observation) }? },
            reward: wire.reward,
            terminated: wire.terminated != 0,
            truncated: wire.truncated != 0,
            valid: wire.valid != 0,
        })
    }
}
