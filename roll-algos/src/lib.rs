//! Algorithms: Reward-FL, flow matching, and agentic PPO.
//!
//! An algorithm composes values and pullbacks of a model and a reward; it sees no device and no autodiff graph.

pub mod agentic_ppo;
pub mod environments;
pub mod error;
pub mod flow_matching;
#[cfg(test)]
mod mock;
mod remembered;
pub mod reward_fl;
pub mod sampling;
mod stopwatch;
mod update;

pub use error::AlgorithmError;
