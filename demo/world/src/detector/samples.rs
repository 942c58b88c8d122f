//! Training pictures: faces of many sizes, some partly occluded, and pictures without a face.

use rayon::prelude::*;
use roll_core::{Noise, Purpose};

use super::SIDE;
use super::anchors::{Targets, Truth};
use super::clutter;
use crate::face::{self, Identity};
use crate::training::pictures::{Augmentation, unit_uniform};

/// Number of identities in the training data.
const IDENTITIES: f32 = 10_000.0;
/// Fraction of pictures without a face.
const EMPTY: f32 = 0.2;
/// Fraction of faces that are partly occluded.
const HIDDEN: f32 = 0.25;
/// Augmentation of the training pictures.
const AUGMENTATION: Augmentation =
    Augmentation { blur_probability: 0.5, max_blur: 1.6, max_noise: 0.15, max_brightness: 0.2, max_gain: 0.15 };

/// A batch.
#[derive(Debug)]
pub struct Batch {
    /// `[N, 3, 64, 64]` in [-1, 1].
    pub pictures: Vec<f32>,
    /// Targets of the anchors.
    pub targets: Targets,
}

/// Returns the batches of update `step`: `parts` batches of `size` pictures.
pub fn batches(seed: u64, step: u64, parts: usize, size: usize) -> Vec<Batch> {
    let samples: Vec<(Vec<f32>, Option<Truth>)> =
        (0..(parts * size) as u64).into_par_iter().map(|sample| draw(seed, step, sample)).collect();
    let batch = |samples: &[(Vec<f32>, Option<Truth>)]| {
        let mut targets = Targets::default();
        samples.iter().for_each(|(_, truth)| targets.push(truth.as_ref()));
        Batch { pictures: samples.iter().flat_map(|s| s.0.iter().copied()).collect(), targets }
    };
    samples.chunks(size).map(batch).collect()
}

fn draw(seed: u64, step: u64, sample: u64) -> (Vec<f32>, Option<Truth>) {
    let noise = Noise::new(seed);
    let mut uniform = noise.uniform(Purpose::Synthetic, step, sample);
    let identity = Identity::new((unit_uniform(&mut uniform) * IDENTITIES) as u64);
    let mut shot = face::random_shot(&mut uniform);
    let empty = unit_uniform(&mut uniform) < EMPTY;
    if empty && unit_uniform(&mut uniform) < 0.4 {
        let mut pixels = clutter::picture(SIDE, &mut uniform);
        AUGMENTATION.apply(&mut pixels, [SIDE; 2], &mut uniform);
        return (pixels, None);
    }
    if empty {
        // Background only: the face lies far outside the picture.
        shot.centre = [-20.0, -20.0];
    }
    let mut picture = face::render(&identity, &shot, [SIDE; 2]);
    let truth = Truth { bounds: picture.bounds, landmarks: picture.landmarks };
    if empty {
        clutter::objects(&mut picture.pixels, SIDE, &mut uniform);
    } else if unit_uniform(&mut uniform) < HIDDEN {
        clutter::occlude(&mut picture.pixels, SIDE, truth.bounds, &mut uniform);
    }
    AUGMENTATION.apply(&mut picture.pixels, picture.size, &mut uniform);
    (picture.pixels, (!empty).then_some(truth))
}
