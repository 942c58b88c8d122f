//! InsightFace's crop around a box, used by its landmark networks.

use super::affine::Affine;

/// Picture pixels to the pixels of a square crop: `scale` times larger, turned by `degrees` around `center`, which
/// comes to the middle.
pub fn face_transform(center: [f64; 2], size: usize, scale: f64, degrees: f64) -> Affine {
    let half = size as f64 / 2.0;
    Affine::scale(scale, scale)
        .then(&Affine::translate(-center[0] * scale, -center[1] * scale))
        .then(&Affine::rotate(degrees.to_radians()))
        .then(&Affine::translate(half, half))
}

/// As [`face_transform`] for a box `[x1, y1, x2, y2]`, whose longer side fills two thirds of the crop.
pub fn around_box([x1, y1, x2, y2]: [f32; 4], size: usize, degrees: f64) -> Affine {
    let [x1, y1, x2, y2] = [x1, y1, x2, y2].map(f64::from);
    let scale = size as f64 / (1.5 * (x2 - x1).max(y2 - y1));
    face_transform([(x1 + x2) / 2.0, (y1 + y2) / 2.0], size, scale, degrees)
}
