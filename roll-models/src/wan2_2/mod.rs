//! Wan2.2, and the Wan2.1 models that share its code. One implementation, configured by what the checkpoint says.

pub mod conditioning;
pub mod dit;
pub mod vae;
