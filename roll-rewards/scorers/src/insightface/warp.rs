//! A warp: samples a picture at positions given by an affine map. Its pullback is the transpose.

use super::affine::Affine;

/// A bilinear warp: output pixel `(i, j)` (row, column) samples the picture at `to_source(j, i)`, where pixel centres
/// are integers. The picture is 0 outside its bounds. Only pixels of the output are computed.
#[derive(Clone, Copy, Debug)]
pub struct Warp {
    /// The map from output pixels to picture pixels.
    pub to_source: Affine,
    /// `[height, width]` of the output.
    pub output: [usize; 2],
    /// `[height, width]` of the picture.
    pub picture: [usize; 2],
}

/// The four neighbours of a sampled point: offset in the plane, and weight; weight 0 for neighbours outside the
/// picture.
type Taps = [(usize, f32); 4];

impl Warp {
    /// Warps `planes` of `picture` into planes of `output`.
    ///
    /// # Panics
    /// Panics unless `planes` is a whole number of planes of `picture`, which must have a pixel.
    pub fn forward(&self, planes: &[f32]) -> Vec<f32> {
        let [size, out_size] = [self.picture, self.output].map(|[h, w]| h * w);
        assert!(
            size > 0 && planes.len().is_multiple_of(size),
            "{} numbers in planes of {:?}",
            planes.len(),
            self.picture
        );
        let mut out = vec![0.0; planes.len() / size * out_size];
        self.for_each_pixel(|out_offset, taps| {
            for (plane, out_plane) in planes.chunks_exact(size).zip(out.chunks_exact_mut(out_size)) {
                out_plane[out_offset] = taps.iter().map(|&(offset, weight)| plane[offset] * weight).sum();
            }
        });
        out
    }

    /// The pullback: adds the cotangent of the picture to `gradient`, given the cotangent of the output. Does nothing
    /// if the picture or the output has no pixel.
    ///
    /// # Panics
    /// Panics unless `cotangent` and `gradient` have the same number of planes.
    pub fn pull(&self, cotangent: &[f32], gradient: &mut [f32]) {
        let [size, out_size] = [self.picture, self.output].map(|[h, w]| h * w);
        if size == 0 || out_size == 0 {
            return;
        }
        assert_eq!(cotangent.len() / out_size, gradient.len() / size, "the same number of planes");
        self.for_each_pixel(|out_offset, taps| {
            let planes = gradient.chunks_exact_mut(size).zip(cotangent.chunks_exact(out_size));
            for (gradient_plane, cotangent_plane) in planes {
                for &(offset, weight) in taps {
                    gradient_plane[offset] += cotangent_plane[out_offset] * weight;
                }
            }
        });
    }

    /// Calls `f` with the output offset and the taps of every output pixel.
    fn for_each_pixel(&self, mut f: impl FnMut(usize, &Taps)) {
        let [height, width] = self.output;
        for i in 0..height {
            for j in 0..width {
                let point = self.to_source.apply([j as f64, i as f64]);
                f(i * width + j, &self.taps(point));
            }
        }
    }

    /// The neighbours of a point of the picture.
    fn taps(&self, [x, y]: [f64; 2]) -> Taps {
        let [height, width] = self.picture;
        let (left, top) = (x.floor(), y.floor());
        let (right_share, lower_share) = (x - left, y - top);
        let mut taps = [(0, 0.0); 4];
        let corners = [
            (left, top, (1.0 - right_share) * (1.0 - lower_share)),
            (left + 1.0, top, right_share * (1.0 - lower_share)),
            (left, top + 1.0, (1.0 - right_share) * lower_share),
            (left + 1.0, top + 1.0, right_share * lower_share),
        ];
        for (tap, (x, y, weight)) in taps.iter_mut().zip(corners) {
            // Compared in f64, so that points far outside and NaN count as outside.
            if x >= 0.0 && y >= 0.0 && x < width as f64 && y < height as f64 {
                *tap = (y as usize * width + x as usize, weight as f32);
            }
        }
        taps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient_check::{dot, noise};

    #[test]
    fn pullback_is_the_transpose_of_the_warp() {
        let to_source = Affine::scale(0.8, 1.1).then(&Affine::rotate(0.3)).then(&Affine::translate(-2.0, 4.0));
        let warp = Warp { to_source, output: [14, 11], picture: [13, 17] };
        let (picture, cotangent) = (noise(1, 3 * 13 * 17), noise(2, 3 * 14 * 11));
        let mut gradient = vec![0.0; picture.len()];
        warp.pull(&cotangent, &mut gradient);
        let (a, b) = (dot(&warp.forward(&picture), &cotangent), dot(&picture, &gradient));
        assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{a} {b}");
        // The warp is linear, so central differences are exact up to rounding.
        let direction = noise(3, picture.len());
        let value = |step: f32| {
            let moved: Vec<f32> = picture.iter().zip(&direction).map(|(p, d)| p + step * d).collect();
            dot(&warp.forward(&moved), &cotangent)
        };
        let (numeric, exact) = ((value(0.5) - value(-0.5)), dot(&direction, &gradient));
        assert!((numeric - exact).abs() < 1e-4 * exact.abs().max(1.0), "{numeric} {exact}");
    }

    #[test]
    fn identity_warp_copies_and_outside_is_zero() {
        let picture = noise(4, 6 * 5);
        let warp = Warp { to_source: Affine::translate(0.0, 0.0), output: [6, 5], picture: [6, 5] };
        assert_eq!(warp.forward(&picture), picture);
        let away = Warp { to_source: Affine::translate(1e300, f64::NAN), ..warp };
        assert!(away.forward(&picture).iter().all(|&v| v == 0.0));
    }

    #[test]
    fn planes_without_a_pixel_are_pulled_back_to_nothing() {
        let warp = |output, picture| Warp { to_source: Affine::translate(0.0, 0.0), output, picture };
        let mut gradient = vec![1.0; 12];
        warp([0, 3], [2, 2]).pull(&[], &mut gradient);
        assert_eq!(gradient, [1.0; 12]);
        warp([2, 2], [0, 3]).pull(&[1.0; 12], &mut []);
    }

    #[test]
    #[should_panic = "planes of [0, 3]"]
    fn a_picture_without_a_pixel_is_not_warped() {
        Warp { to_source: Affine::translate(0.0, 0.0), output: [2, 2], picture: [0, 3] }.forward(&[]);
    }
}
