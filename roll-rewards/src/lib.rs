//! Rewards: a differentiable ONNX executor, the InsightFace identity score, brightness, programs and services elsewhere, and
//! weighted sums.

pub mod brightness;
pub mod combine;
pub mod error;
pub mod insightface;
pub mod onnx;
pub mod remote;

pub use brightness::Brightness;
pub use combine::WeightedSum;
pub use error::RewardError;
pub use remote::RemoteReward;
