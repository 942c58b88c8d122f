//! Reads and writes H.264 in MP4. HEIF and AVIF pictures consist of the same boxes, so their orientation is read here
//! too.
//!
//! The container is parsed here because existing crates index tables by numbers from the file without checks, so that a
//! hostile file causes a panic or unbounded allocation.

mod bits;
mod boxes;
pub(crate) mod heif;
mod reader;
mod sps;
mod tables;
mod timeline;
mod writer;

pub(crate) use reader::{Mp4Reader, check_layout};
pub(crate) use writer::encode;
