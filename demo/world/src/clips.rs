//! Clips of the demo's people as files.

use std::fmt::Write;
use std::path::Path;

use rayon::prelude::*;
use roll_core::{Error, Result, Tensor, Video};
use roll_media::write_mp4;

use crate::face::{Clip, clip, swapped};
use crate::files;

/// Height and width of every frame.
pub const SIZE: [usize; 2] = [64, 64];
/// Frames of a clip, which the VAE encodes to three latent frames.
pub const FRAMES: usize = 9;
/// Frames per second.
pub const FPS: f64 = 8.0;

/// Returns a clip as a video.
pub fn video(clip: &Clip) -> Result<Video> {
    let values = clip.pictures.iter().flat_map(|p| p.pixels.iter().copied()).collect::<Vec<f32>>();
    Video::new(Tensor::new(values, [clip.pictures.len(), 3, SIZE[0], SIZE[1]])?, FPS)
}

/// Writes `count` clips, one per person, and `metadata.csv`.
pub fn write(directory: &Path, first_identity: u64, count: u64, seed: u64) -> Result<()> {
    write_all(directory, first_identity, count, |identity| clip(identity, seed, FRAMES, SIZE))
}

/// Writes clips like [`write`], but in `swaps` of ten clips another person (one of the next `count` people) replaces
/// the person after the first frame. This imitates carelessly collected video, whose clips show more than one person.
pub fn write_mixed(directory: &Path, first_identity: u64, count: u64, seed: u64, swaps: u64) -> Result<()> {
    write_all(directory, first_identity, count, |identity| match identity % 10 < swaps {
        true => swapped(identity, identity + count, seed, FRAMES, SIZE),
        false => clip(identity, seed, FRAMES, SIZE),
    })
}

fn write_all(directory: &Path, first_identity: u64, count: u64, clip: impl Fn(u64) -> Clip + Sync) -> Result<()> {
    std::fs::create_dir_all(directory).map_err(Error::file("create the directory", directory))?;
    let rows: Vec<String> = (first_identity..first_identity + count)
        .into_par_iter()
        .map(|identity| {
            let clip = clip(identity);
            let name = format!("person-{identity:05}.mp4");
            write_mp4(directory.join(&name), &video(&clip)?)?;
            Ok(format!("{name},\"{}\"", clip.prompt))
        })
        .collect::<Result<_>>()?;
    let mut csv = String::from("video,prompt\n");
    for row in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(csv, "{row}");
    }
    files::write(&directory.join("metadata.csv"), csv.as_bytes())
}
