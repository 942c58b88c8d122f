//! Wan2.2, and the Wan2.1 models that share its code. One implementation covers them all; the checkpoint determines the
//! variant.
//!
//! [`dit`] is the transformer, [`vae`] encoder and decoder of the latents, [`umt5`] the text encoder and [`clip`] the
//! image encoder. `model.rs` composes them into [`roll_core::DiffusionModel`], `loading.rs` opens them from options,
//! and [`components`] recognises checkpoints of other libraries. [`inspect`] describes any weight file.
//!
//! It depends on `roll-core`, `roll-external`, `roll-backends` and `roll-network`, and knows no reward and no
//! algorithm. Start at `dit/mod.rs` and `vae/mod.rs`, which are meant to be read beside their papers.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod adapter_io;
mod base_lora;
mod bench;
mod check;
pub mod clip;
pub mod components;
pub mod conditioning;
pub mod dit;
#[cfg(test)]
mod eight_bits_tests;
mod expert;
pub mod export;
mod html;
pub mod init;
pub mod init_tiny;
mod initial_adapters;
pub mod inspect;
mod kind;
pub mod layout;
pub mod loading;
mod model;
pub mod networks;
mod options;
mod parameters;
pub mod paths;
pub mod plan;
mod prompts;
mod resize;
mod text;
pub mod tokenizer;
pub mod umt5;
pub mod vae;

pub use model::{Parts, Settings, Wan};
pub use options::{Checkpoints, IdleExpert, KeepAttention, ModelPaths, Placement, TileSize, VaeDType, WanOptions};
pub use prompts::TextEncoder;
