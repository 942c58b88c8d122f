//! Training runs as a library: what `roll run` does, for programs.
//!
//! A [`config::ConfigLayers`] becomes a checked [`config::Loaded`]; a [`Trainer`] opens data and components from it,
//! trains, evaluates, writes checkpoints and metrics to a [`run_dir::RunDir`], and leaves curves, videos and a report
//! ([`results`]). No component is known here by name: they come from a [`roll_core::Registry`].

pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod evaluation;
pub mod metrics;
pub mod progress;
pub mod results;
pub mod run_dir;
pub mod statistics;
pub mod trainer;

pub use progress::{Session, StopSignal};
pub use trainer::{Summary, Trainer};
