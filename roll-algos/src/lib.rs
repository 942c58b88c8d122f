//! Algorithms: Reward-FL, flow matching, agentic PPO and supervised fine-tuning.
//!
//! An algorithm composes values and pullbacks of a model and a reward; it sees no device and no autodiff graph.

pub mod agentic_ppo;
mod arithmetic;
pub mod environments;
pub mod error;
pub mod flow_matching;
mod notes;
mod ranks;
mod remembered;
pub mod reward_fl;
pub mod sampling;
pub mod sft;
mod stopwatch;
mod update;

pub use error::AlgorithmError;
