//! H.264 in MP4: reading and writing.
//!
//! The container is parsed here rather than by a crate: the crates at hand index tables by numbers of the file, so
//! that a hostile file panics or allocates without bound.

mod bits;
mod boxes;
mod reader;
mod sps;
mod tables;
mod timeline;
mod writer;

pub(crate) use reader::Mp4Reader;
pub(crate) use writer::encode;
