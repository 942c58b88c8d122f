//! Algorithms: Reward-FL.
//!
//! An algorithm composes values and pullbacks of a model and a reward; it sees no device and no autodiff graph.

pub mod error;
pub mod reward_fl;
pub mod sampling;

pub use error::AlgorithmError;
