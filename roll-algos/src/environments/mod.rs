//! Environments for agents: FrozenLake and Sokoban with the text protocol of the reference implementation, any other
//! environment as a separate process or a service, and mixtures of environments.
//!
//! The agent reads an observation and answers with one action per turn, such as `<answer>Right</answer>`. The built-in
//! worlds are determined by their seed.

pub mod action;
pub mod frozen_lake;
pub mod http;
pub mod mixed;
pub mod process;
mod protocol;
pub mod sokoban;

pub use action::{ActionPattern, Parsed};
pub use frozen_lake::FrozenLake;
pub use http::Http;
pub use mixed::Mixed;
pub use process::Process;
pub use sokoban::Sokoban;
