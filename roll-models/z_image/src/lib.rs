//! Z-Image: a text-to-image diffusion transformer, its KL autoencoder and its Qwen3 text encoder.

mod dit;
mod init_tiny;
pub mod text;
pub mod vae;
