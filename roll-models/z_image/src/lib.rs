//! Z-Image: a text-to-image diffusion transformer, its KL autoencoder and its Qwen3 text encoder.
//!
//! [`dit`] is the transformer, [`vae`] encoder and decoder of the latents, and [`text`] the features of a prompt.
//! `model.rs` composes them into [`roll_core::DiffusionModel`], where a picture is a video of one frame, and
//! `loading.rs` opens them from options and registers the model `z_image`. [`keys`] are the names of the weights in
//! other programs' files, and [`lora`] reads and writes adapter files. Start at `dit/mod.rs` and `model.rs`.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod adapter_io;
mod bench;
mod check;
mod describe;
pub mod dit;
#[cfg(test)]
mod eight_bits_tests;
mod files;
pub mod init_tiny;
pub mod keys;
mod layout;
mod loading;
pub mod lora;
mod model;
mod options;
mod plan;
pub mod text;
mod transformer_file;
pub mod vae;

pub use loading::open;
pub use model::{Networks, ZImage};
pub use options::ZImageOptions;
