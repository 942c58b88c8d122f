//! InsightFace's crop around a box, which its landmark networks use.

use super::affine::Affine;

/// The map from picture pixels to the pixels of a square crop of side `size`: scaled by `scale` and rotated by
/// `degrees` around `center`, which is mapped to the middle of the crop.
pub fn face_transform(center: [f64; 2], size: usize, scale: f64, degrees: f64) -> Affine {
    let half = size as f64 / 2.0;
    Affine::scale(scale, scale)
        .then(&Affine::translate(-center[0] * scale, -center[1] * scale))
        .then(&Affine::rotate(degrees.to_radians()))
        .then(&Affine::translate(half, half))
}

/// Like [`face_transform`], for a box `[x1, y1, x2, y2]` whose longer side fills two thirds of the crop.
pub fn around_box([x1, y1, x2, y2]: [f32; 4], size: usize, degrees: f64) -> Affine {
    let [x1, y1, x2, y2] = [x1, y1, x2, y2].map(f64::from);
    let scale = size as f64 / (1.5 * (x2 - x1).max(y2 - y1));
    face_transform([(x1 + x2) / 2.0, (y1 + y2) / 2.0], size, scale, degrees)
}
