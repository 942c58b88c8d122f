//! The parts of a training step that all algorithms share: its update, the shares of ranks, the seconds of its phases.
//!
//! *What it may depend on*: `roll-core`. *Where to start reading*: [`update::finish`], the end of every step.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod error;
pub mod ranks;
pub mod stopwatch;
pub mod update;

pub use error::AlgorithmError;
