//! Videos, pictures and data sets.
//!
//! [`read_video`] reads H.264 MP4, GIF, directories of pictures and single pictures to [`roll_core::Video`], and
//! through the program ffmpeg, where it is installed, everything that it reads; [`write_mp4`] and its siblings write
//! them. [`Dataset`] joins a table of prompts with the files it names, and [`Batches`] says which samples an optimizer
//! step sees.
//!
//! *What it is for*: clips and prompts of training, and videos that people look at. *What it is not*: a general codec;
//! it encodes no latents (`roll-train` keeps them, `roll-models` makes them).
//!
//! ```
//! use roll_core::{Tensor, Video};
//! use roll_data::{ReadOptions, read_video, write_mp4};
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
//! Files are not trusted. A file that is truncated, lies about sizes or is no video is an error that names the file and
//! the reason, and memory is bounded by the sizes that the caller asks for.

mod batches;
mod buckets;
mod color;
mod config;
mod container;
mod dataset;
mod ffmpeg;
mod frames;
mod metadata;
mod mp4;
mod orientation;
mod picture;
mod prefetch;
mod probe;
mod read;
mod resize;
mod still;
mod write;

pub use batches::{Batch, Batches};
pub use buckets::Bucket;
pub use config::{CacheDir, DataConfig, Decoder, OnBadSample};
pub use container::format;
pub use dataset::Dataset;
pub use metadata::{Metadata, MetadataRow};
pub use picture::Picture;
pub use probe::{Probed, probe};
pub use read::{ReadOptions, Sizing, read_image, read_video};
pub use resize::{crop_and_resize, resize, target_size};
pub use write::{contact_sheet, encode_gif, encode_png, write_contact_sheet, write_gif, write_mp4, write_pngs};
