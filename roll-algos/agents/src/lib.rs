//! Algorithms on language models, agentic PPO, supervised fine-tuning and DPO, and the environments that agents act in.
//!
//! *What it is for*: episodes, conversations and preferences, and the maths of training on them. *What it is not*: a trainer
//! (`roll-train` has checkpoints and metrics), and it imports no model.
//!
//! *What it may depend on*: `roll-core`, `roll-external`, `roll-media` and `roll-step`. *Where to start reading*: [`agentic_ppo`],
//! whose `loss` and `advantages` are the formulas of the papers; [`environments`] has the protocol of programs that an
//! agent acts in.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod agentic_ppo;
pub mod conversations;
pub mod dpo;
pub mod environments;
pub mod error;
mod json_rows;
mod notes;
mod pictures;
mod pieces;
pub mod sft;

pub use error::AgentError;
