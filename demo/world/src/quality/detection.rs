//! Detection rate of faces, and accuracy of their landmarks.

use std::path::Path;

use roll_core::{Grad, Noise, Purpose, Result};
use roll_rewards::insightface::Face;
use roll_rewards::insightface::detection::largest;
use roll_rewards::insightface::detector::Detector;
use roll_onnx::{Executor, Network};
use serde::Serialize;

use super::{FIRST_HELD_OUT, Look, SEED, config, picture, rounded, soften};
use crate::detector::{SIDE, clutter};

/// Number of pictures with a face.
const FACES: u64 = 600;
/// Number of pictures without a face.
const EMPTY: u64 = 300;
/// Pictures per batch.
const BATCH: u64 = 50;

/// Figures at the pipeline's score threshold of 0.5.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// Number of pictures with a face, and without.
    pictures: [u64; 2],
    /// Fraction of faces whose largest detection has an intersection over union of at least 0.5 with the true box.
    recall: f64,
    /// Detections with an intersection over union below 0.5 with the face, per picture with a face.
    false_positives_beside_a_face: f64,
    /// Fraction of the pictures without a face in which a face is detected.
    false_positives_without_a_face: f64,
    /// Mean distance between detected and true landmarks, in pixels of a 64x64 picture.
    landmark_error_pixels: f64,
    /// Mean distance between detected and true landmarks, as a fraction of the distance between the eyes.
    landmark_error_of_eye_distance: f64,
    /// Mean intersection over union of detected and true boxes.
    overlap: f64,
}

/// Opens the detector without an embedder.
pub fn open(directory: &Path, file: &str, out: &Path) -> Result<Detector> {
    let device = roll_backends::device("flex")?;
    Detector::new(Network::open(&out.join(file), &device, Executor::Own)?, &config(directory), &device)
}

/// Measures `detector` on pictures of the given look.
pub fn measure(detector: &Detector, look: Look) -> Result<Figures> {
    let (mut found, mut beside) = (0, 0);
    let (mut pixels, mut shares, mut overlaps) = (0.0, 0.0, 0.0);
    for first in (0..FACES).step_by(BATCH as usize) {
        let truths: Vec<_> = (first..first + BATCH).map(|i| picture(FIRST_HELD_OUT + i, 0, look)).collect();
        let frames: Vec<&[f32]> = truths.iter().map(|p| p.pixels.as_slice()).collect();
        for (truth, faces) in truths.iter().zip(detector.detect(&frames, [SIDE; 2], Grad::Skip)?) {
            let face = Face { bounds: truth.bounds, score: 1.0, landmarks: truth.landmarks };
            beside += faces.iter().filter(|f| f.overlap(&face) < 0.5).count();
            let Some(best) = largest(&faces).map(|i| faces[i]).filter(|f| f.overlap(&face) >= 0.5) else { continue };
            let error = mean_distance(&best.landmarks, &face.landmarks);
            let [left, right, ..] = face.landmarks;
            found += 1;
            pixels += error;
            shares += error / distance(left, right).max(1.0);
            overlaps += f64::from(best.overlap(&face));
        }
    }
    let mut seen = 0;
    for first in (0..EMPTY).step_by(BATCH as usize) {
        let empty: Vec<Vec<f32>> = (first..first + BATCH)
            .map(|i| {
                let noise = Noise::new(SEED);
                let mut uniform = noise.uniform(Purpose::Synthetic, u64::MAX, i);
                let mut pixels = clutter::picture(SIDE, &mut uniform);
                soften(&mut pixels, look, &mut uniform);
                pixels
            })
            .collect();
        let frames: Vec<&[f32]> = empty.iter().map(Vec::as_slice).collect();
        seen += detector.detect(&frames, [SIDE; 2], Grad::Skip)?.iter().filter(|faces| !faces.is_empty()).count();
    }
    let mean = |sum: f64| rounded(sum / f64::from(found.max(1)));
    Ok(Figures {
        pictures: [FACES, EMPTY],
        recall: rounded(f64::from(found) / FACES as f64),
        false_positives_beside_a_face: rounded(beside as f64 / FACES as f64),
        false_positives_without_a_face: rounded(seen as f64 / EMPTY as f64),
        landmark_error_pixels: mean(pixels),
        landmark_error_of_eye_distance: mean(shares),
        overlap: mean(overlaps),
    })
}

fn mean_distance(a: &[[f32; 2]; 5], b: &[[f32; 2]; 5]) -> f64 {
    a.iter().zip(b).map(|(a, b)| distance(*a, *b)).sum::<f64>() / 5.0
}

fn distance(a: [f32; 2], b: [f32; 2]) -> f64 {
    f64::from((a[0] - b[0]).hypot(a[1] - b[1]))
}
