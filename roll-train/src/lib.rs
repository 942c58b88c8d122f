//! Training runs as a library: `roll run` for programs.
//!
//! A [`config::ConfigLayers`] becomes a checked [`config::LoadedConfig`]; a [`Trainer`] opens data and components from
//! it, trains, writes checkpoints and metrics to a [`run_dir::RunDir`], and leaves curves, videos and a report
//! ([`results`]). The samples and their measurements belong to a [`task`]. The task for rows of clips and prompts is in
//! `roll-video`. The task for algorithms that bring their own data is in this crate. Components are not known by name
//! here: they come from a [`roll_core::Registry`].
//!
//! This crate has no command line (that is `roll-cli`), and no data, algorithms, models or rewards.
//!
//! ```no_run
//! use roll_core::Registry;
//! use roll_train::Run;
//! use roll_train::config::ConfigLayers;
//!
//! # fn main() -> roll_core::Result<()> {
//! let registry = Registry::linked()?; // components of the crates that are linked
//! let loaded = ConfigLayers::new().file("train.yaml")?.set("steps=100")?.load(Some(&registry))?;
//! let context = loaded.build_context();
//! let summary = Run::new(loaded, &registry, context).dir("runs/mine").train()?;
//! println!("{} steps in {:.0} s", summary.steps, summary.seconds);
//! # Ok(())
//! # }
//! ```
//!
//! [`Run::builder`] describes a run without a file, as in `examples/own_reward.rs`, which also defines a reward. To
//! show progress or to stop a run, see [`Run::train_in`] and [`RunSession`].

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

// The tests load configurations that name these components.
#[cfg(test)]
use {roll_agents as _, roll_causal_lm as _, roll_rewards as _, roll_video as _, roll_wan as _};

pub mod checkpoint;
pub mod config;
pub mod findings;
pub mod metrics;
pub mod on_finish;
pub mod on_metrics;
mod open;
mod own_data;
mod parameters;
pub mod progress;
pub mod ranks;
pub mod results;
pub mod rewards;
pub mod run;
pub mod run_dir;
pub mod signature;
pub mod statistics;
pub mod task;
pub mod trainer;
mod validate;
mod weighted_sum;

pub use findings::Finding;
pub use open::Checked;
pub use progress::{RunSession, StopSignal};
pub use rewards::reward;
pub use run::{Run, RunBuilder};
pub use trainer::{RunSummary, Trainer};
pub use validate::Validator;
