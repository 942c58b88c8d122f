//! Rewards: any ONNX network (a differentiable executor), CLIP, the InsightFace identity score, scores of pixels
//! without a network, and programs and services elsewhere.
//!
//! *What it is for*: rewards by configuration, and [`onnx`] for networks of your own with gradients. *What it is not*:
//! needed to write a reward; the trait is `roll_core::RewardScorer`.
//!
//! A reward by its type, its score, and the gradient of the score:
//!
//! ```
//! use roll_core::{Grad, RewardScorer, Score, Target, Tensor, Video};
//! use roll_rewards::Brightness;
//! use roll_rewards::brightness::BrightnessConfig;
//!
//! # fn main() -> roll_core::Result<()> {
//! let mut reward = Brightness::new(BrightnessConfig { target: 0.75 })?;
//! let dark = Video::new(Tensor::full([2, 3, 4, 4], -0.5), 8.0)?; // frames, channels, height, width in -1..1
//! let (score, pullback) = reward.score(&dark, "a prompt", &Target::default(), Grad::Record)?;
//! let Score::Value { value, .. } = score else { panic!("the video has pixels") };
//! assert!((value + 0.25).abs() < 1e-6, "minus the squared distance of 0.25 and 0.75");
//!
//! let gradient = pullback.expect("it was recorded").pull(&Tensor::scalar(1.0))?;
//! assert!(gradient.f32s()?.iter().all(|slope| *slope > 0.0), "brighter frames would score higher");
//! # Ok(())
//! # }
//! ```

pub mod brightness;
pub mod clip;
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
pub use error::RewardError;
pub use onnx_reward::OnnxReward;
pub use remote::RemoteReward;
