//! Training of video diffusion models: the algorithms Reward-FL, DiffusionNFT, Flow-GRPO and flow matching, and the
//! data that their runs train on.
//!
//! An algorithm composes values and pullbacks of a model and a reward; it sees no device and no autodiff graph.
//! [`rows`] are the clips and prompts of `data.metadata`. [`task`] is the task of runs on these rows: it deals rows
//! out to the algorithm, evaluates, and looks for reward hacking. Both come with the feature `task`; a plugin uses the
//! algorithms alone.
//!
//! *What it is not*: a trainer (`roll-train` has steps, checkpoints and metrics), and it imports no model and no
//! reward.
//!
//! *Where to start reading*: [`reward_fl`], whose `loss.rs` and `trajectory.rs` are the paper's formulas;
//! [`policy_gradient`] has the parts that DiffusionNFT and Flow-GRPO share; `task/mod.rs` is a step from its rows to
//! its report.
//!
//! A step of Reward-FL on the test doubles of `roll-testing`, a model of eight numbers and a reward of sines:
//!
//! ```
//! use roll_video::reward_fl::{RewardFl, RewardFlConfig};
//! use roll_testing::{Bench, Sines, sample};
//!
//! let algorithm = RewardFl::new(RewardFlConfig { mid_timestep: 0, ..RewardFlConfig::default() });
//! let mut bench = Bench::new(algorithm, Sines::new());
//! let report = bench.step(0, &[sample(0, "a"), sample(1, "b")], 0.1);
//! assert_eq!(report.metrics["actor/samples"], 2.0);
//! assert!(report.metrics["actor/score"].is_finite() && report.metrics["actor/grad_norm"] > 0.0);
//! ```

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

// The tests load configurations that name the model of `roll-wan`.
#[cfg(test)]
use roll_wan as _;

mod arithmetic;
pub mod diffusion_nft;
mod draw_keys;
pub mod error;
pub mod flow_grpo;
pub mod flow_matching;
pub mod kl_reference;
mod notes;
pub mod policy_gradient;
mod report;
pub mod reward_fl;
#[cfg(feature = "task")]
pub mod rows;
mod sample_cache;
mod sampler;
pub mod sampling;
mod schedule;
pub mod scoring;
#[cfg(feature = "task")]
pub mod task;

pub use error::VideoError;
pub use sampler::{Integration, Sampler};
pub use schedule::FlowSchedule;
