//! Rewards: any ONNX network (a differentiable executor), CLIP, the InsightFace identity score, what pixels tell without a
//! network, programs and services elsewhere, and weighted sums.
//!
//! *What it is for*: rewards by configuration, and [`onnx`] for networks of your own with gradients. *What it is not*:
//! needed to write a reward; the trait is `roll_core::RewardScorer`.

pub mod brightness;
pub mod clip;
pub mod combine;
pub mod error;
#[cfg(test)]
mod gradient_check;
pub mod insightface;
pub mod onnx;
pub mod onnx_reward;
pub mod picture;
pub mod pixels;
pub mod remote;

pub use brightness::Brightness;
pub use combine::WeightedSum;
pub use error::RewardError;
pub use onnx_reward::OnnxReward;
pub use remote::RemoteReward;
