//! Reading and writing of clips.

#![allow(clippy::unwrap_used)]

mod ffmpeg;
mod video;
