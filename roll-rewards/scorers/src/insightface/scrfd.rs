//! Reads faces from the outputs of SCRFD: anchors at strides 8, 16 and 32, two per position.

use roll_core::{Error, Result};

use super::detection::Face;

/// Strides of the three output levels.
pub const STRIDES: [usize; 3] = [8, 16, 32];
/// Number of anchors per position.
const ANCHORS: usize = 2;
/// Numbers of an anchor's box.
const BOX_WIDTH: usize = 4;
/// Numbers of an anchor's landmarks.
const LANDMARKS_WIDTH: usize = 10;

/// The raw outputs of one level. Anchor `(y * columns + x) * 2 + a` is at canvas pixel `(x, y) * stride`. Distances and
/// offsets are in units of the stride.
#[derive(Clone, Copy, Debug)]
pub struct Level<'a> {
    /// Distance between anchors in canvas pixels.
    pub stride: usize,
    /// Confidence of each anchor.
    pub scores: &'a [f32],
    /// Distances of each anchor to the left, top, right and bottom side of the box.
    pub boxes: &'a [f32],
    /// Offsets (x, y) of each anchor's five landmarks.
    pub landmarks: &'a [f32],
}

/// Decodes the faces of one level with a confidence of at least `threshold`, in canvas pixels and in the order of
/// anchors.
///
/// Fails unless the level has the anchors of a `side` x `side` canvas.
pub fn decode(level: Level<'_>, side: usize, threshold: f32) -> Result<Vec<Face>> {
    let Level { stride, scores, boxes, landmarks } = level;
    let columns = side / stride;
    let anchors = columns * columns * ANCHORS;
    let expected = [anchors, BOX_WIDTH * anchors, LANDMARKS_WIDTH * anchors];
    let found = [scores.len(), boxes.len(), landmarks.len()];
    if found != expected {
        return Err(Error::shape(
            format!("outputs of the face detector at stride {stride} (scores, boxes, landmarks)"),
            format!("{expected:?} values for {anchors} anchors"),
            &found,
        ));
    }
    let above = scores.iter().enumerate().filter(|(_, score)| **score >= threshold);
    Ok(above
        .map(|(anchor, &score)| {
            let position = anchor / ANCHORS;
            let (x, y) = ((position % columns * stride) as f32, (position / columns * stride) as f32);
            let s = stride as f32;
            let distances = &boxes[BOX_WIDTH * anchor..][..BOX_WIDTH];
            let offsets = &landmarks[LANDMARKS_WIDTH * anchor..][..LANDMARKS_WIDTH];
            Face {
                bounds: [x - distances[0] * s, y - distances[1] * s, x + distances[2] * s, y + distances[3] * s],
                score,
                landmarks: std::array::from_fn(|i| [x + offsets[2 * i] * s, y + offsets[2 * i + 1] * s]),
            }
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn face_is_decoded_from_its_anchor() {
        let (mut scores, mut boxes, landmarks) = (vec![0.0; 32], vec![0.0; 128], vec![0.5; 320]);
        scores[13] = 0.8; // position 6: row 1, column 2
        boxes[52..56].copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
        let level = Level { stride: 8, scores: &scores, boxes: &boxes, landmarks: &landmarks };
        let faces = decode(level, 32, 0.5).unwrap();
        assert_eq!(faces, [Face { bounds: [8.0, -8.0, 40.0, 40.0], score: 0.8, landmarks: [[20.0, 12.0]; 5] }]);
        assert!(decode(level, 64, 0.5).is_err());
    }
}
