//! Wan2.2, and the Wan2.1 models that share its code. One implementation, configured by what the checkpoint says.

mod adapter;
pub mod clip;
pub mod components;
pub mod conditioning;
pub mod dit;
pub mod export;
pub mod hub;
pub mod init;
pub mod init_tiny;
pub mod loading;
mod model;
pub mod names;
mod options;
pub mod paths;
pub mod plan;
mod resize;
mod text;
pub mod tokenizer;
pub mod umt5;
pub mod vae;

pub use model::{Parts, Settings, TextEncoder, Wan, trainable};
pub use options::{Placement, WanOptions};
