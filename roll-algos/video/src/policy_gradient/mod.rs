//! Policy gradients for video diffusion models, which train on a score without its gradient.
//!
//! Several videos are generated for each prompt and scored. The advantage of a video says how much better it is than
//! the other videos of its prompt. [`crate::diffusion_nft`] and [`crate::flow_grpo`] differ in the loss that uses the
//! advantages. The maths here are functions of predictions, in f64 over f32 tensors.

pub mod advantages;
mod algorithm;
pub mod clip;
pub mod distance;
pub(crate) mod levels;
mod loss_mask;
pub mod old_policy;
mod options;
pub(crate) mod round;
#[cfg(test)]
mod scoring_tests;
pub mod sde;
pub(crate) mod tally;
#[cfg(test)]
pub(crate) mod test_training;

pub use algorithm::PolicyGradient;
pub(crate) use algorithm::{Method, TrainingState};
pub use loss_mask::LossMask;
pub use options::SeveralRewards;
pub(crate) use options::{SharedOptions, shared_options};
