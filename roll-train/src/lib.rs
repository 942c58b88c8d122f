//! Training runs as a library: `roll run` for programs.
//!
//! A [`config::ConfigLayers`] becomes a checked [`config::LoadedConfig`]; a [`Trainer`] opens data and components from
//! it, trains, evaluates, writes checkpoints and metrics to a [`run_dir::RunDir`], and leaves curves, videos and a
//! report ([`results`]). No component is known here by name: they come from a [`roll_core::Registry`].
//!
//! *What it is not*: a command line (`roll-cli`), or a place for algorithms, models and rewards.
//!
//! ```no_run
//! use roll_core::{BuildContext, Registry};
//! use roll_train::config::ConfigLayers;
//! use roll_train::run_dir::{Existing, RunDir};
//! use roll_train::{RunSession, Trainer};
//!
//! # fn main() -> roll_core::Result<()> {
//! let registry = Registry::linked()?; // components of crates that are linked, and of this program
//! let loaded = ConfigLayers::new().file("train.yaml")?.set("steps=100")?.load(Some(&registry))?;
//! let context = BuildContext { seed: loaded.config.seed, ..BuildContext::new(&loaded.config.backend) };
//! let trainer = Trainer::new(loaded, &registry, &context)?;
//! let run = RunDir::create("runs/mine", Existing::Refuse)?;
//! let summary = trainer.run(Some(&run), &RunSession::default())?;
//! println!("{} steps in {:.0} s", summary.steps, summary.seconds);
//! # Ok(())
//! # }
//! ```
//!
//! `examples/own_reward.rs` trains with a reward that the program defines. To show progress or to stop a run, see
//! [`RunSession`]. A program that allows several ranks (the key `ranks`) puts all of this into [`ranks::run`].

pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod evaluation;
pub mod metrics;
pub mod on_finish;
pub mod progress;
pub mod ranks;
pub mod results;
pub mod run_dir;
mod sample_prompts;
pub mod statistics;
pub mod trainer;

pub use progress::{RunSession, StopSignal};
pub use trainer::{RunSummary, Trainer};
