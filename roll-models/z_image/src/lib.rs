//! Z-Image: a text-to-image diffusion transformer, its KL autoencoder and its Qwen3 text encoder.
//!
//! [`dit`] is the transformer, [`keys`] the names of its weights in other programs' files, and [`lora`] reads adapter
//! files. [`vae`] is encoder and decoder of the latents, and [`text`] the features of a prompt. The crate registers no
//! model yet: these networks are not composed.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod dit;
pub mod init_tiny;
pub mod keys;
pub mod lora;
pub mod text;
pub mod vae;
