//! The overview sheet of the demo world: people, poses, motions.

use std::path::Path;

use roll_core::{Noise, Purpose, Result};
use roll_media::{Picture, encode_png};

use crate::clips::SIZE;
use crate::face::{self, Identity, Shot, clip, random_shot, render};
use crate::files;

/// Pictures per row.
const COLUMNS: usize = 12;
/// Pixels of the sheet per pixel of a picture.
const SCALE: usize = 2;

/// Writes the sheet: rows of neutral people, of random shots (four per person), and of clips (four frames each).
pub fn write(path: &Path) -> Result<()> {
    let noise = Noise::new(1);
    let mut uniform = noise.uniform(Purpose::Synthetic, 0, 0);
    let mut pictures: Vec<_> =
        (0..4 * COLUMNS as u64).map(|i| render(&Identity::new(100 + i), &Shot::default(), SIZE)).collect();
    for i in 0..2 * COLUMNS as u64 {
        pictures.push(render(&Identity::new(100 + i / 4), &random_shot(&mut uniform), SIZE));
    }
    for i in 0..2 * COLUMNS as u64 / 4 {
        pictures.extend(clip(200 + i, i, 4, SIZE).pictures);
    }
    files::write(path, &encode_png(&grid(&pictures, COLUMNS, SCALE))?)
}

/// Arranges pictures of one size in rows, each pixel enlarged to `scale` x `scale`.
pub fn grid(pictures: &[face::Picture], columns: usize, scale: usize) -> Picture {
    let [h, w] = pictures.first().map_or([0, 0], |p| p.size);
    let (width, height) = (columns * w * scale, pictures.len().div_ceil(columns) * h * scale);
    let mut rgb = vec![255; 3 * width * height];
    for (i, picture) in pictures.iter().enumerate() {
        let (top, left) = (i / columns * h * scale, i % columns * w * scale);
        for y in 0..h * scale {
            for x in 0..w * scale {
                for c in 0..3 {
                    let value = picture.pixels[(c * h + y / scale) * w + x / scale];
                    rgb[3 * ((top + y) * width + left + x) + c] = ((value + 1.0) * 127.5).round() as u8;
                }
            }
        }
    }
    Picture { width, height, rgb }
}
