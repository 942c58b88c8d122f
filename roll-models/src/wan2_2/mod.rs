//! Wan2.2, and the Wan2.1 models that share its code. One implementation, configured by what the checkpoint says.

pub mod clip;
pub mod components;
pub mod conditioning;
pub mod dit;
pub mod hub;
pub mod init_tiny;
pub mod names;
pub mod paths;
mod resize;
mod text;
pub mod tokenizer;
pub mod umt5;
pub mod vae;
