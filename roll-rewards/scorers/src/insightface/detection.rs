//! Parts that all face detectors share: preparation of the input, and non-maximum suppression.

use roll_core::{Error, Result};

use crate::picture::{Filter, Resize};

/// A detected face, in pixels of the frame.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Face {
    /// Box `[x1, y1, x2, y2]`.
    pub bounds: [f32; 4],
    /// Confidence in [0, 1].
    pub score: f32,
    /// Eyes, nose and corners of the mouth as (x, y), left to right in the picture.
    pub landmarks: [[f32; 2]; 5],
}

impl Face {
    /// Area of the box.
    pub fn area(&self) -> f32 {
        let [x1, y1, x2, y2] = self.bounds;
        (x2 - x1) * (y2 - y1)
    }

    /// Divides every coordinate by `scale`.
    pub fn divided_by(mut self, scale: f32) -> Self {
        self.bounds = self.bounds.map(|v| v / scale);
        self.landmarks = self.landmarks.map(|p| p.map(|v| v / scale));
        self
    }

    /// Intersection over union of the boxes.
    pub fn overlap(&self, other: &Self) -> f32 {
        let ([left, top, right, bottom], [other_left, other_top, other_right, other_bottom]) =
            (self.bounds, other.bounds);
        let common_width = (right.min(other_right) - left.max(other_left)).max(0.0);
        let common_height = (bottom.min(other_bottom) - top.max(other_top)).max(0.0);
        let common = common_width * common_height;
        common / (self.area() + other.area() - common)
    }
}

/// Non-maximum suppression: visits faces by descending confidence and keeps those that overlap every kept face by at
/// most `iou`. Faces with values that are not finite are dropped.
pub fn suppress(mut candidates: Vec<Face>, iou: f32) -> Vec<Face> {
    candidates
        .retain(|f| f.score.is_finite() && f.bounds.iter().chain(f.landmarks.iter().flatten()).all(|v| v.is_finite()));
    candidates.sort_by(|a, b| b.score.total_cmp(&a.score));
    let mut kept: Vec<Face> = Vec::new();
    for face in candidates {
        if kept.iter().all(|k| k.overlap(&face) <= iou) {
            kept.push(face);
        }
    }
    kept
}

/// Index of the face with the largest box.
pub fn largest(faces: &[Face]) -> Option<usize> {
    (0..faces.len()).max_by(|&a, &b| faces[a].area().total_cmp(&faces[b].area()))
}

/// Scales a frame into the upper left corner of a square canvas, with its aspect ratio kept.
#[derive(Clone, Debug)]
pub struct Letterbox {
    resize: Resize,
    /// `[height, width]` of the scaled frame.
    content: [usize; 2],
    /// Side of the canvas.
    side: usize,
    /// Canvas pixels per frame pixel.
    pub scale: f32,
}

impl Letterbox {
    /// Prepares the scaling of frames of `[height, width]`. Fails if a side of the scaled frame would have no pixel.
    pub fn new(frame: [usize; 2], side: usize) -> Result<Self> {
        let [h, w] = frame;
        let ratio = h as f64 / w as f64;
        let content =
            if h > w { [side, (side as f64 / ratio) as usize] } else { [(side as f64 * ratio) as usize, side] };
        if h == 0 || w == 0 || content.contains(&0) {
            return Err(Error::shape("frame for the face detector", "at least one pixel of each side, scaled", &frame));
        }
        // Faces are mapped back by the scale of the height on both axes, as in the reference implementation.
        let scale = content[0] as f32 / h as f32;
        Ok(Self { resize: Resize::new(frame, content, Filter::Bilinear), content, side, scale })
    }

    /// Draws a frame `[3, H, W]` in [-1, 1] on the canvas `[3, side, side]`; `padding` fills the rest.
    pub fn canvas(&self, frame: &[f32], padding: f32) -> Vec<f32> {
        let ([height, width], side) = (self.content, self.side);
        let mut canvas = vec![padding; 3 * side * side];
        for (row, values) in self.resize.forward(frame).chunks_exact(width).enumerate() {
            let (plane, y) = (row / height, row % height);
            let at = (plane * side + y) * side;
            canvas[at..at + width].copy_from_slice(values);
        }
        canvas
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn face(bounds: [f32; 4], score: f32) -> Face {
        Face { bounds, score, landmarks: [[0.0; 2]; 5] }
    }

    #[test]
    fn nms_keeps_the_most_confident_face() {
        let faces = vec![
            face([0.0, 0.0, 10.0, 10.0], 0.6),
            face([1.0, 0.0, 11.0, 10.0], 0.9),
            face([40.0, 0.0, 45.0, 5.0], 0.7),
            face([0.0, 0.0, f32::NAN, 5.0], 0.99),
        ];
        let kept = suppress(faces, 0.4);
        assert_eq!(kept.iter().map(|f| f.score).collect::<Vec<_>>(), [0.9, 0.7]);
        assert_eq!(largest(&kept), Some(0));
        assert_eq!(largest(&[]), None);
    }

    #[test]
    fn letterbox_keeps_aspect_ratio_and_pads() {
        let letterbox = Letterbox::new([20, 40], 80).unwrap();
        let canvas = letterbox.canvas(&[0.5; 3 * 20 * 40], -1.0);
        assert_eq!(letterbox.scale, 2.0);
        assert!((canvas[39 * 80 + 79] - 0.5).abs() < 1e-6);
        assert_eq!(canvas[40 * 80], -1.0);
        assert!(Letterbox::new([1, 1000], 80).is_err());
        assert!(Letterbox::new([0, 10], 80).is_err());
    }
}
