//! Reads faces from the outputs of YuNet: one prior per position at strides 8, 16 and 32.

use roll_core::{Error, Result};

use super::detection::Face;

/// The raw outputs of one level. Prior `y * columns + x` is at canvas pixel `(x, y) * stride`. Offsets and sizes are in
/// units of the stride.
#[derive(Clone, Copy, Debug)]
pub struct Level<'a> {
    /// Distance between priors in canvas pixels.
    pub stride: usize,
    /// Probability of the class "face", given an object.
    pub classes: &'a [f32],
    /// Probability of an object.
    pub objects: &'a [f32],
    /// Offset of the centre and logarithm of the size of each prior's box.
    pub boxes: &'a [f32],
    /// Offsets (x, y) of each prior's five landmarks.
    pub landmarks: &'a [f32],
}

/// Decodes the faces of one level with a score of at least `threshold`, in canvas pixels. The score is the geometric
/// mean of both probabilities.
///
/// Fails unless the level has the priors of a `side` x `side` canvas.
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
    let priors_of_faces = (0..priors).filter(|&prior| score(prior) >= threshold);
    Ok(priors_of_faces
        .map(|prior| {
            let (x, y) = ((prior % columns) as f32, (prior / columns) as f32);
            let prior_box = &boxes[4 * prior..4 * prior + 4];
            let offsets = &landmarks[10 * prior..10 * prior + 10];
            let [cx, cy] = [(x + prior_box[0]) * s, (y + prior_box[1]) * s];
            let [w, h] = [prior_box[2].exp() * s, prior_box[3].exp() * s];
            Face {
                bounds: [cx - w / 2.0, cy - h / 2.0, cx + w / 2.0, cy + h / 2.0],
                score: score(prior),
                landmarks: std::array::from_fn(|i| [(x + offsets[2 * i]) * s, (y + offsets[2 * i + 1]) * s]),
            }
        })
        .collect())
}
