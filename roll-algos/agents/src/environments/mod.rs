//! Environments for agents: FrozenLake and Sokoban with the text protocol of the reference implementation, squares in
//! pictures, questions with known answers, any other environment as a separate process or a service, any agent's program
//! as it is, and mixtures of environments.
//!
//! The agent reads an observation and answers with one action per turn, such as `<answer>Right</answer>`. The built-in
//! worlds are determined by their seed.

pub mod action;
pub mod agent;
pub mod find_square;
pub mod frozen_lake;
pub mod http;
pub mod mixed;
pub mod process;
mod protocol;
pub mod questions;
pub mod sokoban;

pub use action::ActionPattern;
pub use agent::Agent;
pub use find_square::FindSquare;
pub use frozen_lake::FrozenLake;
pub use http::Http;
pub use mixed::Mixed;
pub use process::Process;
pub(crate) use protocol::seed_on_the_wire;
pub use questions::Questions;
pub use sokoban::Sokoban;

use rand::RngCore;
use rand_chacha::ChaCha8Rng;
use roll_external::sha256;

/// Whether the start `key` is for validations alone: its hash is among the lowest `share` of all hashes.
fn is_held_out(key: &str, share: f64) -> bool {
    // Reading from memory cannot fail.
    let digest = sha256(key.as_bytes()).map(|(digest, _)| digest).unwrap_or_default();
    let hash = u64::from_str_radix(digest.get(..13).unwrap_or_default(), 16).unwrap_or_default();
    (hash as f64) < share * (1u64 << 52) as f64
}

/// Draws uniformly from [0, 1).
fn uniform(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws uniformly from 0..n.
fn below(rng: &mut ChaCha8Rng, n: usize) -> usize {
    (uniform(rng) * n as f64) as usize
}
