//! Training crops: random shots of random people, cropped around landmarks with the error of a detector.

use rayon::prelude::*;
use roll_core::{Noise, Purpose};
use roll_rewards::insightface::align::{Alignment, Crop};

use super::{CROP, loss};
use crate::face::{self, Identity};
use crate::training::gaussian;
use crate::training::pictures::Augmentation;

/// Side of the rendered frames.
const SIDE: usize = 64;
/// Standard deviation of a landmark's error, in pixels.
const LANDMARK_ERROR: f32 = 0.7;
/// Augmentation of the training crops.
const AUGMENTATION: Augmentation =
    Augmentation { blur_probability: 0.6, max_blur: 1.6, max_noise: 0.08, max_brightness: 0.12, max_gain: 0.08 };

/// A batch.
#[derive(Debug)]
pub struct Batch {
    /// `[N, 3, 112, 112]` in [-1, 1].
    pub crops: Vec<f32>,
    /// The class of each crop.
    pub classes: Vec<usize>,
}

/// Returns the batches of update `step`: `parts` batches of `size` crops.
pub fn batches(seed: u64, first_identity: u64, step: u64, parts: usize, size: usize) -> Vec<Batch> {
    let samples: Vec<(Vec<f32>, usize)> =
        (0..(parts * size) as u64).into_par_iter().map(|sample| draw(seed, first_identity, step, sample)).collect();
    let batch = |samples: &[(Vec<f32>, usize)]| Batch {
        crops: samples.iter().flat_map(|s| s.0.iter().copied()).collect(),
        classes: samples.iter().map(|s| s.1).collect(),
    };
    samples.chunks(size).map(batch).collect()
}

fn draw(seed: u64, first_identity: u64, step: u64, sample: u64) -> (Vec<f32>, usize) {
    let noise = Noise::new(seed);
    let mut uniform = noise.uniform(Purpose::Synthetic, step, sample);
    let class = ((0.5 + 0.5 * uniform()) * loss::CLASSES as f32) as usize % loss::CLASSES;
    let identity = Identity::new(first_identity + class as u64);
    let shot = face::random_shot(&mut uniform);
    let mut picture = face::render(&identity, &shot, [SIDE; 2]);
    AUGMENTATION.apply(&mut picture.pixels, picture.size, &mut uniform);
    let landmarks = picture.landmarks.map(|p| p.map(|v| v + LANDMARK_ERROR * gaussian(&mut uniform)));
    // The jitter never makes five landmarks coincide exactly; a grey crop would do no harm.
    let crop = Crop::new(&landmarks, picture.size, Alignment::Exact);
    (crop.map_or_else(|| vec![0.0; 3 * CROP * CROP], |crop| crop.forward(&picture.pixels)), class)
}
