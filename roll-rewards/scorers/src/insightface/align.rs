//! Alignment: the crop of a face whose five landmarks lie where the embedder expects them (the ArcFace template).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::affine::Affine;
use super::warp::Warp;
use crate::picture::{Filter, Resize};

/// Side in pixels of the crop that embedders expect.
pub const CROP: usize = 112;

/// Positions of the landmarks (eyes, nose, corners of the mouth, left to right in the picture) in InsightFace's 112x112
/// crop.
pub const TEMPLATE: [[f64; 2]; 5] =
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]];

/// How a crop is sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Alignment {
    /// The exact similarity in pixel coordinates.
    #[default]
    Exact,
    /// ROLL's `norm_crop`, which normalises by width and height for an `align_corners` grid. This displaces samples by
    /// 0.25 to 0.96 pixels, and stretches the crop of a frame below 112 pixels.
    Reference,
}

/// The similarity (rotation, uniform scale, translation) that maps `points` to `onto` with the least squared error.
///
/// Umeyama 1991 in two dimensions, where the optimal rotation has a closed form and reflections never occur. `None` if
/// the points coincide or are not finite.
pub fn similarity(points: &[[f64; 2]], onto: &[[f64; 2]]) -> Option<Affine> {
    let n = points.len().min(onto.len()) as f64;
    let mean = |p: &[[f64; 2]]| p.iter().fold([0.0, 0.0], |[x, y], q| [x + q[0] / n, y + q[1] / n]);
    let ([px, py], [qx, qy]) = (mean(points), mean(onto));
    // Sums over the centred pairs of their dot products, their cross products, and the squares of the points.
    let (mut along, mut across, mut spread) = (0.0, 0.0, 0.0);
    for (&[x, y], &[u, v]) in points.iter().zip(onto) {
        let (x, y, u, v) = (x - px, y - py, u - qx, v - qy);
        along += x * u + y * v;
        across += x * v - y * u;
        spread += x * x + y * y;
    }
    if !spread.is_normal() || !along.is_finite() || !across.is_finite() {
        return None;
    }
    let (a, b) = (along / spread, across / spread);
    Some(Affine([[a, -b, qx - a * px + b * py], [b, a, qy - b * px - a * py]]))
}

/// The similarity from picture pixels to template pixels. `None` if the landmarks coincide or are not finite.
pub fn to_template(landmarks: &[[f32; 2]; 5]) -> Option<Affine> {
    similarity(&landmarks.map(|p| p.map(f64::from)), &TEMPLATE)
}

/// The warp of ROLL's `affine_grid` and `grid_sample` for `to_crop`, the map from picture pixels to crop pixels. Its
/// canvas is as large as the picture and is cut to `size`. Its coordinates are divided by `W` where the grid expects
/// `W - 1`. `None` if `to_crop` has no inverse.
pub fn reference_warp(to_crop: &Affine, picture: [usize; 2], size: usize) -> Option<Warp> {
    let [y_factor, x_factor] = picture.map(|n| n as f64 / (n as f64 - 1.0));
    let to_source = Affine::scale(x_factor, y_factor)
        .then(&to_crop.inverse()?)
        .then(&Affine::scale(1.0 / x_factor, 1.0 / y_factor));
    Some(Warp { to_source, output: picture.map(|n| n.min(size)), picture })
}

/// The exact warp for `to_crop`, the map from picture pixels to crop pixels. `None` if `to_crop` has no inverse.
pub fn exact_warp(to_crop: &Affine, picture: [usize; 2], size: usize) -> Option<Warp> {
    Some(Warp { to_source: to_crop.inverse()?, output: [size, size], picture })
}

/// A 112x112 crop of a frame, linear in the frame.
#[derive(Clone, Debug)]
pub struct Crop {
    warp: Warp,
    /// Stretches the result of `warp` to 112x112, if [`Alignment::Reference`] makes a smaller crop of a small frame.
    stretch: Option<Resize>,
}

impl Crop {
    /// The crop of a `[height, width]` frame around `landmarks`; `None` if the landmarks coincide or are not finite.
    pub fn new(landmarks: &[[f32; 2]; 5], frame: [usize; 2], alignment: Alignment) -> Option<Self> {
        let to_crop = to_template(landmarks)?;
        let warp = match alignment {
            Alignment::Exact => exact_warp(&to_crop, frame, CROP)?,
            // A side of one pixel has no corners to align.
            Alignment::Reference if frame.contains(&1) => return None,
            Alignment::Reference => reference_warp(&to_crop, frame, CROP)?,
        };
        let is_small = warp.output != [CROP, CROP];
        Some(Self { warp, stretch: is_small.then(|| Resize::new(warp.output, [CROP, CROP], Filter::Bilinear)) })
    }

    /// Computes the crop, `[3, 112, 112]`, of a frame `[3, H, W]`.
    pub fn forward(&self, frame: &[f32]) -> Vec<f32> {
        let crop = self.warp.forward(frame);
        match &self.stretch {
            Some(stretch) => stretch.forward(&crop),
            None => crop,
        }
    }

    /// The pullback: adds the cotangent of the frame to `gradient`, given the cotangent of the crop.
    pub fn pull(&self, cotangent: &[f32], gradient: &mut [f32]) {
        match &self.stretch {
            Some(stretch) => self.warp.pull(&stretch.pull(cotangent), gradient),
            None => self.warp.pull(cotangent, gradient),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient_check::{dot, noise};

    fn template_landmarks() -> [[f32; 2]; 5] {
        TEMPLATE.map(|p| p.map(|v| v as f32))
    }

    #[test]
    fn similarity_recovers_a_known_map() {
        let map = Affine::scale(1.7, 1.7).then(&Affine::rotate(-2.8)).then(&Affine::translate(40.0, 7.0));
        let moved = TEMPLATE.map(|p| map.apply(p));
        let found = similarity(&TEMPLATE, &moved).unwrap();
        let off = found.0.iter().flatten().zip(map.0.iter().flatten()).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(off < 1e-10, "{found:?} {map:?}");
    }

    #[test]
    fn template_landmarks_crop_the_frame_itself() {
        let frame = noise(5, 3 * 112 * 112);
        let crop = Crop::new(&template_landmarks(), [112, 112], Alignment::Exact).unwrap();
        let off = crop.forward(&frame).iter().zip(&frame).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(off < 1e-4, "{off}");
    }

    #[test]
    fn coinciding_or_non_finite_landmarks_have_no_crop() {
        for landmarks in [[[3.0, 4.0]; 5], [[f32::NAN, 0.0]; 5], [[f32::INFINITY, 1.0]; 5]] {
            assert!(Crop::new(&landmarks, [64, 64], Alignment::Exact).is_none());
        }
        assert!(Crop::new(&template_landmarks(), [1, 64], Alignment::Reference).is_none());
    }

    #[test]
    fn pullback_is_the_transpose_of_the_crop() {
        for (alignment, [h, w]) in
            [Alignment::Exact, Alignment::Reference].into_iter().flat_map(|a| [(a, [150, 130]), (a, [60, 90])])
        {
            let crop = Crop::new(&template_landmarks(), [h, w], alignment).unwrap();
            let (frame, cotangent) = (noise(6, 3 * h * w), noise(7, 3 * CROP * CROP));
            let mut gradient = vec![0.0; frame.len()];
            crop.pull(&cotangent, &mut gradient);
            let (a, b) = (dot(&crop.forward(&frame), &cotangent), dot(&frame, &gradient));
            assert!((a - b).abs() < 1e-4 * a.abs().max(1.0), "{alignment:?} {a} {b}");
        }
    }
}
