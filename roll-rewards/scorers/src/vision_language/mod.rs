//! Rewards that see and read: heads on vision-language networks, with gradients to the frames.
//!
//! - [`videoalign`]: VideoReward of VideoAlign (visual quality, motion quality, text alignment of a clip);
//! - [`hpsv3`]: HPSv3 (human preference for pictures, here for frames).
//!
//! The network is behind [`roll_core::VisionLanguageModel`]. `sampling` chooses frames, [`roll_media::Pixels`]
//! turns them into a network's input, `pixels` pulls gradients back, `chat` builds the text. The reward `judge` uses them too
//! (`reward.local`).

mod chat;
mod checkpoint;
#[cfg(test)]
pub(crate) mod end_to_end;
pub mod hpsv3;
#[cfg(test)]
pub(crate) mod mock;
mod opened;
#[cfg(test)]
pub(crate) mod parity;
mod pixels;
mod plan;
mod prompt_file;
mod sampling;
#[cfg(test)]
mod tests;
pub mod videoalign;

pub(crate) use roll_media::{PixelLimits, Pixels};

pub(crate) use chat::{Placeholder, chat_tokens, refuse_reserved};
pub use checkpoint::Dimension;
pub(crate) use opened::Opened;
pub(crate) use pixels::{mean_pullback, pull_all};
pub(crate) use plan::{PLANNED_FPS, network_needs, planned_medium, planned_prompt};

/// The system turn of the chat template of Qwen2-VL and Qwen2.5-VL.
pub(crate) const DEFAULT_SYSTEM: &str = "You are a helpful assistant.";
