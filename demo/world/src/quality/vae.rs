//! Reconstruction error of the VAE, and the distribution of its latents.

use std::path::Path;

use image::{Rgb, RgbImage};
use roll_core::{Error, Grad, Result, Tensor};
use roll_wan::vae::{Chunking, Vae};
use roll_network::weights::Checkpoint;
use serde::Serialize;

use super::{FIRST_HELD_OUT, networks, record, rounded, verification};
use crate::embedder::Role;
use crate::face::{self, Picture};
use crate::vae::{FILE, FRAMES, SIDE};

/// Number of clips, one per person.
const CLIPS: u64 = 64;
/// Number of clips on the sheet.
const SHOWN: usize = 8;
const SHOWN_FRAMES: [usize; 2] = [0, FRAMES - 1];
/// Pixels of the sheet per pixel of a frame.
const ZOOM: u32 = 3;

/// The figures of the VAE.
#[derive(Debug, Serialize)]
struct Figures {
    /// Number of clips that were encoded and decoded.
    clips: u64,
    /// Peak signal-to-noise ratio (PSNR) in dB, from the mean squared error over all clips.
    psnr: f64,
    /// PSNR of the worst clip.
    psnr_worst: f64,
    /// PSNR of first frames. A first frame has a latent frame of its own.
    psnr_first_frame: f64,
    /// PSNR of the other frames, which share a latent frame with three others.
    psnr_other_frames: f64,
    /// Similarity of faces and their reconstructions: mean cosine over frames, by the embedder that is never used as a
    /// reward.
    likeness: f64,
    /// Smallest and largest mean of a channel of the normalized latents.
    latent_means: [f64; 2],
    /// Smallest and largest standard deviation of a channel of the normalized latents.
    latent_deviations: [f64; 2],
}

/// Measures the VAE below `out`, prints the figures, writes them to `quality.json`, and draws a sheet of originals and
/// reconstructions.
pub fn measure(out: &Path) -> Result<()> {
    let state = Checkpoint::open(out.join(FILE))?.all()?;
    let vae = Vae::load(&state, &roll_backends::device("flex")?)?;
    let judge = networks(Role::Check, out)?;
    let (mut errors, mut latents, mut likeness) = (Vec::new(), Vec::new(), Vec::new());
    let mut sheet = RgbImage::new(ZOOM * (SIDE * SHOWN) as u32, ZOOM * (SIDE * 2 * SHOWN_FRAMES.len()) as u32);
    for i in 0..CLIPS {
        let clip = face::clip(FIRST_HELD_OUT + i, i, FRAMES, [SIDE; 2]);
        let video = Tensor::new(frames(&clip.pictures), [FRAMES, 3, SIDE, SIDE])?;
        let encoded = vae.encode(&video)?;
        let (decoded, _) = vae.decode_clamped(&encoded, &Chunking::default(), Grad::Skip)?;
        errors.push(frame_errors(&video, &decoded)?);
        likeness.push(verification::likeness(&judge, &each(&video)?, &each(&decoded)?)?);
        latents.push(encoded);
        if (i as usize) < SHOWN {
            for (row, frame) in SHOWN_FRAMES.into_iter().enumerate() {
                draw(&mut sheet, [i as usize, 2 * row], &video, frame)?;
                draw(&mut sheet, [i as usize, 2 * row + 1], &decoded, frame)?;
            }
        }
    }
    let (means, deviations) = channels(&latents)?;
    let worst = errors.iter().map(|clip| mean(clip)).fold(0.0, f64::max);
    let first: Vec<f64> = errors.iter().map(|clip| clip[0]).collect();
    let others: Vec<f64> = errors.iter().flat_map(|clip| clip[1..].to_vec()).collect();
    let figures = Figures {
        clips: CLIPS,
        psnr: psnr(mean(&errors.concat())),
        psnr_worst: psnr(worst),
        psnr_first_frame: psnr(mean(&first)),
        psnr_other_frames: psnr(mean(&others)),
        likeness: rounded(mean(&likeness)),
        latent_means: range(&means),
        latent_deviations: range(&deviations),
    };
    let path = out.join("vae_reconstructions.png");
    sheet.save(&path).map_err(|e| Error::bad_file(&path, e.to_string()))?;
    println!("wrote {}", path.display());
    record(out, "vae", &figures)
}

/// Concatenates the frames: `[T, 3, H, W]`.
fn frames(pictures: &[Picture]) -> Vec<f32> {
    pictures.iter().flat_map(|p| p.pixels.iter().copied()).collect()
}

/// Returns the frames of a video, `[3, H, W]` each.
fn each(video: &Tensor) -> Result<Vec<Vec<f32>>> {
    Ok(video.f32s()?.chunks_exact(3 * SIDE * SIDE).map(<[f32]>::to_vec).collect())
}

/// Returns the mean squared error of each frame.
fn frame_errors(a: &Tensor, b: &Tensor) -> Result<Vec<f64>> {
    let frame = 3 * SIDE * SIDE;
    let squares =
        |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / frame as f64;
    Ok(a.f32s()?.chunks_exact(frame).zip(b.f32s()?.chunks_exact(frame)).map(squares).collect())
}

/// Returns the PSNR in dB of values in [-1, 1].
fn psnr(squared_error: f64) -> f64 {
    rounded(10.0 * (4.0 / squared_error).log10())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn range(values: &[f64]) -> [f64; 2] {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    [rounded(least), rounded(values.iter().copied().fold(f64::NEG_INFINITY, f64::max))]
}

/// Returns mean and standard deviation of each channel over all latents, `[C, T, H, W]` each.
fn channels(latents: &[Tensor]) -> Result<(Vec<f64>, Vec<f64>)> {
    let count = latents.first().map_or(0, |l| l.shape()[0]);
    let (mut means, mut deviations) = (vec![], vec![]);
    for c in 0..count {
        let mut values = Vec::new();
        for latent in latents {
            let size = latent.len() / count;
            values.extend(latent.f32s()?[c * size..][..size].iter().map(|&v| f64::from(v)));
        }
        let centre = mean(&values);
        let squares: Vec<f64> = values.iter().map(|v| (v - centre).powi(2)).collect();
        means.push(centre);
        deviations.push(mean(&squares).sqrt());
    }
    Ok((means, deviations))
}

/// Draws a frame of a video at a column and a row of the sheet.
fn draw(sheet: &mut RgbImage, [column, row]: [usize; 2], video: &Tensor, frame: usize) -> Result<()> {
    let plane = SIDE * SIDE;
    let pixels = &video.f32s()?[frame * 3 * plane..][..3 * plane];
    for y in 0..SIDE as u32 * ZOOM {
        for x in 0..SIDE as u32 * ZOOM {
            let at = (y / ZOOM) as usize * SIDE + (x / ZOOM) as usize;
            let byte = |c: usize| ((pixels[c * plane + at] + 1.0) * 127.5).round().clamp(0.0, 255.0) as u8;
            let place = [(column * SIDE) as u32 * ZOOM + x, (row * SIDE) as u32 * ZOOM + y];
            sheet.put_pixel(place[0], place[1], Rgb([byte(0), byte(1), byte(2)]));
        }
    }
    Ok(())
}
