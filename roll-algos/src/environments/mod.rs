//! Environments: FrozenLake and Sokoban with the text protocol of the reference, any other in a process of its own or
//! as a service, and several in one.
//!
//! The agent reads a map and answers with one action in a turn, `<answer>Right</answer>`. Worlds depend on the seed
//! alone.

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
