//! Training frames: first single pictures, then clips.

use rayon::prelude::*;
use roll_core::{Noise, Purpose};

use super::{FRAMES, SIDE};
use crate::face::{self, Identity, Picture};
use crate::training::gaussian;
use crate::training::pictures::share;

/// Identities that are drawn from.
const IDENTITIES: f32 = 10_000.0;
/// Share of the updates that see single pictures.
const STILLS: f64 = 0.85;
const SEED: u64 = 11;

/// The frames of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Single pictures, which teach nearly everything at a fraction of the cost.
    Stills,
    /// Clips, which teach the layers that look across time.
    Clips,
}

impl Stage {
    /// That of update `step` of `steps`.
    pub fn at(step: u64, steps: u64) -> Self {
        if (step as f64) < STILLS * steps as f64 { Self::Stills } else { Self::Clips }
    }
}

/// A part of a batch.
#[derive(Debug)]
pub struct Part {
    /// Whether the frames are one clip.
    pub stage: Stage,
    /// `[3, T, H, W]` in [-1, 1].
    pub frames: Vec<f32>,
    /// Its shape.
    pub shape: [usize; 4],
    /// Of the noise on its latents.
    pub seed: u64,
}

/// The batch of update `step` in `parts` parts, of `size` pictures or of one clip each.
pub fn batch(stage: Stage, step: u64, parts: usize, size: usize) -> Vec<Part> {
    (0..parts as u64).into_par_iter().map(|part| draw(stage, step, part, size)).collect()
}

fn draw(stage: Stage, step: u64, part: u64, size: usize) -> Part {
    let mut uniform = Noise::new(SEED).uniform(Purpose::Synthetic, step, part);
    let seed = step * 64 + part;
    let mut identity = || (share(&mut uniform) * IDENTITIES) as u64;
    let pictures: Vec<_> = match stage {
        Stage::Clips => {
            // Five frames are two chunks, nine are three: half as many updates of each cost as much.
            let frames = if step.is_multiple_of(2) { FRAMES } else { FRAMES.div_ceil(2) };
            let clip = face::clip(identity(), seed, FRAMES, [SIDE; 2]);
            clip.pictures.into_iter().take(frames).collect()
        }
        Stage::Stills => (0..size as u64).flat_map(|i| still(identity(), seed * 64 + i, i)).take(size).collect(),
    };
    let shape = [3, pictures.len(), SIDE, SIDE];
    Part { stage, frames: by_channel(&pictures), shape, seed }
}

/// A picture at a random angle, or the last frame of a clip: its expression and motion are at their strongest.
fn still(identity: u64, seed: u64, i: u64) -> Option<Picture> {
    if i.is_multiple_of(2) {
        let mut uniform = Noise::new(SEED).uniform(Purpose::Shuffle, seed, 0);
        return Some(face::render(&Identity::new(identity), &face::random_shot(&mut uniform), [SIDE; 2]));
    }
    face::clip(identity, seed, 2, [SIDE; 2]).pictures.pop()
}

/// Pictures `[3, H, W]` as one volume `[3, T, H, W]`.
pub fn by_channel(pictures: &[Picture]) -> Vec<f32> {
    let plane = SIDE * SIDE;
    (0..3).flat_map(|c| pictures.iter().flat_map(move |p| p.pixels[c * plane..][..plane].iter().copied())).collect()
}

/// Normal values of the given standard deviation.
pub fn noise(seed: u64, count: usize, deviation: f32) -> Vec<f32> {
    let mut uniform = Noise::new(SEED).uniform(Purpose::Latents, seed, 0);
    (0..count).map(|_| deviation * gaussian(&mut uniform)).collect()
}
