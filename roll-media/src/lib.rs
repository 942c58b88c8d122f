//! Videos and pictures: reading and writing.
//!
//! [`read_video`] reads H.264 MP4, GIF, directories of images and single images to [`roll_core::Video`]; everything
//! else that ffmpeg can read is read through the program ffmpeg, if it is installed. [`probe`] reads size and length
//! alone. [`write_mp4`] and its siblings write files.
//!
//! The crate is for the clips of training, and for videos that people look at. It is not a general codec, it knows no
//! data set (`roll-video` has the rows of metadata), and it encodes no latents (`roll-wan` does). It depends on
//! `roll-core` and `roll-external`, and on no other crate of this project. Start reading at [`read_video`] (`read.rs`).
//!
//! ```
//! use roll_core::{Tensor, Video};
//! use roll_media::{ReadOptions, read_video, write_mp4};
//!
//! # fn main() -> roll_core::Result<()> {
//! let path = std::env::temp_dir().join(format!("roll-doc-{}.mp4", std::process::id()));
//! let grey = Video::new(Tensor::full([5, 3, 32, 48], 0.25), 8.0)?; // frames, channels, height, width in -1..1
//! write_mp4(&path, &grey)?;
//!
//! let read = read_video(&path, &ReadOptions::default())?;
//! assert_eq!((read.dims(), read.fps()), ([5, 32, 48], 8.0));
//! assert!(read.frames().f32s()?.iter().all(|value| (value - 0.25).abs() < 0.05), "H.264 rounds");
//! # std::fs::remove_file(&path).expect("the file can be deleted");
//! # Ok(())
//! # }
//! ```
//!
//! Files are not trusted. A file that is truncated, has inconsistent sizes or is not a video is an error that names the
//! file and the reason, and memory is bounded by the sizes that the caller requests.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod animation;
mod color;
mod complete;
mod container;
mod decoding;
mod ffmpeg;
mod frames;
mod jpeg;
mod mp4;
mod network_input;
mod orientation;
mod picture;
mod probe;
mod probed;
mod read;
mod read_options;
mod resample;
mod resize;
mod still;
mod tiff;
mod write;

pub use container::{format, is_animated, is_picture};
pub use network_input::{MEAN, PixelLimits, Pixels, STD, nearest_multiple};
pub use picture::{Picture, check_size};
pub use probe::probe;
pub use probed::Probed;
pub use read::{is_resource_fork, read_image, read_image_by, read_video};
pub use read_options::{Decoder, ReadOptions, Sizing};
pub use resample::{Filter, Resize};
pub use resize::{crop_and_resize, resize, target_size};
pub use still::decode_still;
pub use write::{
    clip_extension, clip_file, contact_sheet, encode_gif, encode_png, is_clip_of_one_frame, write_clip,
    write_contact_sheet, write_gif, write_mp4, write_pngs,
};
