//! Rewards of roll: the InsightFace identity score, CLIP, VideoAlign, HPSv3, any ONNX network, scores of pixels without
//! a network, questions to a vision language model or to people, and programs and services of your own.
//!
//! - *Purpose*: rewards that a configuration names. A reward of your own needs only the trait
//!   `roll_core::RewardScorer`, not this crate.
//! - *Dependencies*: `roll-core`, `roll-external`, `roll-backends`, `roll-media`, `roll-weights` and `roll-onnx`. A
//!   reward knows no model and no algorithm.
//! - *Where to start*: [`brightness`] is the smallest complete reward, [`insightface`] the main one.
//!
//! The example scores a video and computes the gradient of the score:
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

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod brightness;
pub mod clip;
pub mod error;
#[cfg(test)]
mod gradient_check;
pub mod insightface;
pub mod judge;
pub mod onnx_reward;
pub mod picture;
pub mod pixels;
pub mod remote;
pub mod vision_language;
pub mod vote;

pub use brightness::Brightness;
pub use error::RewardError;
pub use judge::Judge;
pub use onnx_reward::OnnxReward;
pub use remote::RemoteReward;
pub use vote::Vote;
