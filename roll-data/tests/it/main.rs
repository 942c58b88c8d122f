//! Reading and writing of clips, and data sets of them.

#![allow(clippy::unwrap_used)]

mod dataset;
mod ffmpeg;
mod video;
