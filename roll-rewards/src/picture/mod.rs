//! Frames as a network's input: selection, resizing, cropping, normalisation, and the pullbacks of these. `through.rs`
//! composes them with a network into a score.

mod choice;
mod input;
pub mod luma;
mod resize;
mod through;

pub use choice::{Frames, OverFrames, check_common};
pub use input::{ChannelOrder, Fit, Input, Layout, Prepared, Size};
pub use resize::{Filter, Resize};
pub use through::{Look, Reading, RowNetwork, RowsPull};
