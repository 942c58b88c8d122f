//! Frames as a network's input: selection, resizing, cropping, normalisation, and the pullbacks of these steps.
//! `frame_scorer.rs` composes the steps with a network into a score.

mod frame_scorer;
mod frames;
mod input;
pub mod luma;

pub(crate) use frame_scorer::check_rows;
pub use frame_scorer::{FrameScorer, RowNetwork, RowScore, RowsPull};
pub use frames::{Frames, OverFrames, check_on_missing};
pub use input::{ChannelOrder, Fit, Input, Layout, Preprocess, Size};
pub use roll_media::{Filter, Resize};
