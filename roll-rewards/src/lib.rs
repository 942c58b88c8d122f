//! Rewards: a differentiable ONNX executor, the InsightFace identity score, brightness, programs, and weighted sums.

pub mod brightness;
pub mod combine;
pub mod command;
pub mod error;
pub mod insightface;
pub mod onnx;

pub use brightness::Brightness;
pub use combine::WeightedSum;
pub use command::CommandReward;
pub use error::RewardError;
