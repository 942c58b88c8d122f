//! The InsightFace identity score: face detection, alignment, embedding, and the similarity of embeddings.
//!
//! [`reward::IdentityReward`] is the reward; [`networks::FaceNetworks`] the two networks behind it. The gradient passes
//! through embedding and crop; the position of a face is a constant.

pub mod affine;
pub mod align;
pub mod config;
pub mod detection;
pub mod detector;
mod directory;
pub mod embedder;
pub mod networks;
pub mod pooling;
pub mod reward;
pub mod scrfd;
pub mod warp;
pub mod yunet;

pub use config::{ChannelOrder, IdentityConfig, Padding, Undetected};
pub use detection::Face;
pub use networks::{FaceNetworks, FrameFace};
pub use reward::IdentityReward;

#[cfg(test)]
mod tests;
