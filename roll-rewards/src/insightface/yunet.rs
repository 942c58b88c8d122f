//! YuNet's post-processing: one prior per position at strides 8, 16 and 32.

use roll_core::{Error, Result};

use super::detection::Face;

/// One level's raw outputs for prior `y * columns + x`, in strides.
#[derive(Clone, Copy, Debug)]
pub struct Level<'a> {
    /// Canvas pixels between priors.
    pub stride: usize,
    /// Probability of the class "face", given an object.
    pub classes: &'a [f32],
    /// Probability of an object.
    pub objects: &'a [f32],
    /// Offset of the centre and logarithm of the size, per prior.
    pub boxes: &'a [f32],
    /// Offsets x, y of five landmarks per prior.
    pub landmarks: &'a [f32],
}

/// The faces of one level with at least `threshold` (the geometric mean of both probabilities), in canvas pixels.
///
/// Fails when the level does not hold the priors of a `side` x `side` canvas.
pub fn decode(level: Level<'_>, side: usize, threshold: f32) -> Result<Vec<Face>> {
    let Level { stride, classes, objects, boxes, landmarks } = level;
    let columns = side / stride;
    let priors = columns * columns;
    let found = [classes.len(), objects.len(), boxes.len(), landmarks.len()];
    let expected = [priors, priors, 4 * priors, 10 * priors];
    if found != expected {
        return Err(Error::shape(
            format!("outputs of the face detector at stride {stride} (class, object, boxes, landmarks)"),
            format!("{expected:?} values for {priors} priors"),
            &found,
        ));
    }
    let s = stride as f32;
    let score = |prior: usize| (classes[prior].clamp(0.0, 1.0) * objects[prior].clamp(0.0, 1.0)).sqrt();
    let above = (0..priors).filter(|&prior| score(prior) >= threshold);
    Ok(above
        .map(|prior| {
            let (x, y) = ((prior % columns) as f32, (prior / columns) as f32);
            let b = &boxes[4 * prior..4 * prior + 4];
            let k = &landmarks[10 * prior..10 * prior + 10];
            let ([cx, cy], [w, h]) = ([(x + b[0]) * s, (y + b[1]) * s], [b[2].exp() * s, b[3].exp() * s]);
            Face {
                bounds: [cx - w / 2.0, cy - h / 2.0, cx + w / 2.0, cy + h / 2.0],
                score: score(prior),
                landmarks: std::array::from_fn(|i| [(x + k[2 * i]) * s, (y + k[2 * i + 1]) * s]),
            }
        })
        .collect())
}
