//! Frames as networks take them: which ones, resized, cut, normalised; and the way back of their gradients.

mod choice;
mod input;
pub mod luma;
mod resize;
mod through;

pub use choice::{Frames, OverFrames, check_common};
pub use input::{ChannelOrder, Fit, Input, Layout, Prepared, Size};
pub use resize::{Filter, Resize};
pub use through::{Look, Reading, RowNetwork, RowsPull};
