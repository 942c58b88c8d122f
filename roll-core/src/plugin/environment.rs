//! [`Environment`] across the boundary.

use std::ffi::c_void;

use super::abi::{RollError, RollObject, RollOwned, RollStr};
use super::call::{Foreign, Served, Source, serve};
use super::layout::boundary;
use crate::{Environment, Observation, Result, Transition};

boundary! {
    /// Result of `step`.
    #[derive(Default)]
    pub struct RollTransition {
        pub observation: RollOwned<u8>,
        pub reward: f64,
        pub terminated: u32,
        pub truncated: u32,
        pub valid: u32,
    }
}

boundary! {
    /// What an environment says of itself as it stands.
    #[derive(Default)]
    pub struct RollEnvironmentFacts {
        pub instructions: RollOwned<u8>,
        /// 0 no, 1 yes, 2 it does not tell.
        pub solved: u32,
    }
}

boundary! {
    /// The functions of an environment.
    #[derive(Clone, Copy)]
    pub struct RollEnvironmentTable {
        pub reset: unsafe extern "C" fn(
            state: *mut c_void,
            seed: u64,
            out: *mut RollOwned<u8>,
            error: *mut RollError,
        ) -> u32,
        pub step: unsafe extern "C" fn(
            state: *mut c_void,
            action: RollStr,
            out: *mut RollTransition,
            error: *mut RollError,
        ) -> u32,
        pub facts:
            unsafe extern "C" fn(state: *mut c_void, out: *mut RollEnvironmentFacts, error: *mut RollError) -> u32,
    }
}

type Target = dyn Environment;

static TABLE: RollEnvironmentTable = RollEnvironmentTable { reset, step, facts };

pub(super) fn give(environment: Box<dyn Environment>) -> RollObject {
    Served::give(environment, &TABLE)
}

unsafe extern "C" fn reset(state: *mut c_void, seed: u64, out: *mut RollOwned<u8>, error: *mut RollError) -> u32 {
    let body = |environment: &mut Target| Ok(RollOwned::text(environment.reset(seed)?.text));
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn step(state: *mut c_void, action: RollStr, out: *mut RollTransition, error: *mut RollError) -> u32 {
    let body = |environment: &mut Target| {
        // SAFETY: lent for this call.
        let next = environment.step(unsafe { action.get() }?)?;
        Ok(RollTransition {
            observation: RollOwned::text(next.observation.text),
            reward: next.reward,
            terminated: next.terminated.into(),
            truncated: next.truncated.into(),
            valid: next.valid.into(),
        })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn facts(state: *mut c_void, out: *mut RollEnvironmentFacts, error: *mut RollError) -> u32 {
    let body = |environment: &mut Target| {
        let solved = environment.solved().map_or(2, u32::from);
        Ok(RollEnvironmentFacts { instructions: RollOwned::text(environment.instructions()), solved })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

/// An environment of the other side.
pub(super) struct ForeignEnvironment(Foreign<RollEnvironmentTable>);

impl ForeignEnvironment {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { Foreign::new(object, source) }.map(Self)
    }

    fn facts(&self) -> Result<(String, Option<bool>)> {
        let facts: RollEnvironmentFacts =
            // SAFETY: the arguments live during the call.
            self.0.call("facts", |t, state, out, error| unsafe { (t.facts)(state, out, error) })?;
        let solved = match facts.solved {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        };
        Ok((self.text("facts", facts.instructions)?.text, solved))
    }

    /// As [`Self::facts`]; the calls that ask for them cannot fail.
    fn known_facts(&self) -> (String, Option<bool>) {
        self.facts().unwrap_or_else(|error| {
            tracing::error!("an environment does not tell what it is: {}", super::Chain::line(&error));
            (String::new(), None)
        })
    }

    fn text(&self, call: &'static str, text: RollOwned<u8>) -> Result<Observation> {
        // SAFETY: ours, taken once.
        let text = self.0.blame(call, unsafe { text.take_text() })?;
        Ok(Observation { text })
    }
}

impl Environment for ForeignEnvironment {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        // SAFETY: the arguments live during the call.
        let text = self.0.call("reset", |t, state, out, error| unsafe { (t.reset)(state, seed, out, error) })?;
        self.text("reset", text)
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        let action = RollStr::lend(action);
        // SAFETY: the arguments live during the call.
        let next: RollTransition =
            self.0.call("step", |t, state, out, error| unsafe { (t.step)(state, action, out, error) })?;
        Ok(Transition {
            observation: self.text("step", next.observation)?,
            reward: next.reward,
            terminated: next.terminated != 0,
            truncated: next.truncated != 0,
            valid: next.valid != 0,
        })
    }

    fn instructions(&self) -> String {
        self.known_facts().0
    }

    fn solved(&self) -> Option<bool> {
        self.known_facts().1
    }
}
