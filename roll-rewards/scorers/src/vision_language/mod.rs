//! Rewards that see and read: heads on vision-language networks, with gradients to the frames.
//!
//! - [`videoalign`]: VideoReward of VideoAlign (visual quality, motion quality, text alignment of a clip);
//! - [`hpsv3`]: HPSv3 (human preference for pictures, here for frames).
//!
//! The network is behind [`roll_core::VisionLanguageModel`]. `sampling` chooses frames and sizes, `pixels` turns frames
//! into a network's input and pulls gradients back, `chat` builds the text. The reward `judge` uses them too
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

use roll_core::{Medium, Result, Tensor, Video, VisionLanguageModel};

pub(crate) use chat::{Placeholder, chat_tokens, refuse_reserved};
pub use checkpoint::Dimension;
pub(crate) use opened::Opened;
pub(crate) use pixels::{Pixels, mean_pullback, pull_all};
pub(crate) use plan::{PLANNED_FPS, network_needs, planned_medium, planned_prompt};
pub(crate) use sampling::PixelLimits;

/// The system turn of the chat template of Qwen2-VL and Qwen2.5-VL.
pub(crate) const DEFAULT_SYSTEM: &str = "You are a helpful assistant.";

/// Pictures with fewer pixels are enlarged: `min_pixels` of the processors of Qwen2-VL and Qwen2.5-VL.
const MIN_PIXELS: usize = 56 * 56;

/// The limits of a processor with at most `max` pixels.
pub(crate) fn processor_limits(max: usize) -> PixelLimits {
    PixelLimits { min: MIN_PIXELS.min(max), max }
}

/// The chat that asks `text` about `pictures` (`[3, H, W]` in [-1, 1], each reduced to at most `max_pixels`): its tokens
/// up to the opening of the answer, and its media. `system` is the system turn, by default that of the published
/// template. Fails if the text holds a token of the chat or of media.
pub fn question(
    network: &dyn VisionLanguageModel,
    system: Option<&str>,
    pictures: &[Tensor],
    text: &str,
    max_pixels: usize,
) -> Result<(Vec<u32>, Vec<Medium>)> {
    let (facts, limits) = (network.facts(), processor_limits(max_pixels));
    refuse_reserved(network, text, &[])?;
    let medium = |picture: &Tensor| {
        let shape = [&[1], picture.shape()].concat();
        Pixels::new(&Video::new(picture.reshape(shape)?, 1.0)?, vec![0], limits, facts)?.medium(1.0)
    };
    let media = pictures.iter().map(medium).collect::<Result<Vec<Medium>>>()?;
    let counts = media.iter().map(|medium| facts.tokens_of(medium.pixels.shape())).collect::<Result<Vec<usize>>>()?;
    let system = system.unwrap_or(DEFAULT_SYSTEM);
    Ok((chat_tokens(network, system, Placeholder::Image, &counts, text)?, media))
}
