//! Resizing of pictures in floats, with every filter of the common libraries. It is linear in the picture; the pullback is
//! its transpose. `resize.rs` has the bit-exact copy of Pillow's bilinear filter in bytes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a picture is resized. Pixel centres are at half integers, as in Pillow, OpenCV and PyTorch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Filter {
    /// The input pixel that contains the centre of the output pixel.
    Nearest,
    /// Pillow's `BOX`; OpenCV's `INTER_AREA` for integer reductions.
    Box,
    /// Pillow's `BILINEAR`, torchvision's with `antialias=True`. The more a picture is reduced, the wider the filter.
    #[default]
    Bilinear,
    /// Pillow's `BICUBIC` (a = -0.5), torchvision's with `antialias=True`.
    Bicubic,
    /// Pillow's `LANCZOS`.
    Lanczos,
    /// OpenCV's `INTER_LINEAR`, PyTorch's `interpolate` without `antialias`: two neighbours at every scale.
    PlainBilinear,
    /// OpenCV's `INTER_CUBIC`, PyTorch's `interpolate` without `antialias` (a = -0.75): four neighbours.
    PlainBicubic,
}

impl Filter {
    /// Whether values of the resized picture may exceed the range of the picture.
    pub fn overshoots(self) -> bool {
        matches!(self, Self::Bicubic | Self::Lanczos | Self::PlainBicubic)
    }

    /// Half the filter's width in pixels of the input; [`widened_taps`] widens it in reductions.
    fn reach(self) -> f64 {
        match self {
            Self::Nearest | Self::Box => 0.5,
            Self::Bilinear | Self::PlainBilinear => 1.0,
            Self::Bicubic | Self::PlainBicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// The filter's weight at a distance of `x` pixels from its centre, before normalisation.
    fn weight(self, x: f64) -> f64 {
        let cubic = |a: f64| match x.abs() {
            x if x < 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
            x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * a,
            _ => 0.0,
        };
        let sinc = |x: f64| match x * std::f64::consts::PI {
            0.0 => 1.0,
            x => x.sin() / x,
        };
        match self {
            Self::Nearest | Self::Box => f64::from(u8::from(x > -0.5 && x <= 0.5)),
            Self::Bilinear | Self::PlainBilinear => (1.0 - x.abs()).max(0.0),
            Self::Bicubic => cubic(-0.5),
            Self::PlainBicubic => cubic(-0.75),
            Self::Lanczos if x.abs() < 3.0 => sinc(x) * sinc(x / 3.0),
            Self::Lanczos => 0.0,
        }
    }
}

/// Resizes planes of one size, first their columns and then their rows.
#[derive(Clone, Debug)]
pub struct Resize {
    rows: Axis,
    columns: Axis,
}

impl Resize {
    /// Prepares the resizing from one `[height, width]` to another.
    pub fn new(from: [usize; 2], to: [usize; 2], filter: Filter) -> Self {
        Self { rows: Axis::new(from[0], to[0], filter), columns: Axis::new(from[1], to[1], filter) }
    }

    /// Resizes every plane of `planes`.
    ///
    /// # Panics
    /// Panics unless `planes` is a whole number of planes.
    pub fn forward(&self, planes: &[f32]) -> Vec<f32> {
        let (rows, columns) = (&self.rows, &self.columns);
        assert_eq!(planes.len() % (rows.from * columns.from).max(1), 0, "planes of {} x {}", rows.from, columns.from);
        // Widths are resized first, so that the second pass adds up whole rows, which have their new width already.
        let mut resized_columns = vec![0.0; planes.len() / columns.from.max(1) * columns.to()];
        for (row, resized) in planes.chunks_exact(columns.from).zip(resized_columns.chunks_exact_mut(columns.to())) {
            for (value, (first, weights)) in resized.iter_mut().zip(&columns.taps) {
                *value = row[*first..].iter().zip(weights).map(|(v, w)| v * w).sum();
            }
        }
        let width = columns.to();
        let mut out = vec![0.0; resized_columns.len() / rows.from.max(1) * rows.to()];
        let resized_planes = out.chunks_exact_mut(rows.to() * width);
        for (plane, resized) in resized_columns.chunks_exact(rows.from * width).zip(resized_planes) {
            for (resized_row, (first, weights)) in resized.chunks_exact_mut(width).zip(&rows.taps) {
                for (row, weight) in plane[first * width..].chunks_exact(width).zip(weights) {
                    resized_row.iter_mut().zip(row).for_each(|(o, v)| *o += v * weight);
                }
            }
        }
        out
    }

    /// The pullback: maps the cotangent of the resized planes to the cotangent of the planes.
    ///
    /// # Panics
    /// Panics unless `cotangent` is a whole number of resized planes.
    pub fn pull(&self, cotangent: &[f32]) -> Vec<f32> {
        let (rows, columns) = (&self.rows, &self.columns);
        assert_eq!(
            cotangent.len() % (rows.to() * columns.to()).max(1),
            0,
            "planes of {} x {}",
            rows.to(),
            columns.to()
        );
        let width = columns.to();
        let mut full_height = vec![0.0; cotangent.len() / rows.to().max(1) * rows.from];
        for (plane, d_plane) in
            full_height.chunks_exact_mut(rows.from * width).zip(cotangent.chunks_exact(rows.to() * width))
        {
            for (d_row, (first, weights)) in d_plane.chunks_exact(width).zip(&rows.taps) {
                for (row, weight) in plane[first * width..].chunks_exact_mut(width).zip(weights) {
                    row.iter_mut().zip(d_row).for_each(|(r, c)| *r += c * weight);
                }
            }
        }
        let mut out = vec![0.0; full_height.len() / width.max(1) * columns.from];
        for (row, d_row) in out.chunks_exact_mut(columns.from).zip(full_height.chunks_exact(width)) {
            for (d_value, (first, weights)) in d_row.iter().zip(&columns.taps) {
                row[*first..].iter_mut().zip(weights).for_each(|(r, w)| *r += d_value * w);
            }
        }
        out
    }
}

/// The resizing of one axis.
#[derive(Clone, Debug)]
struct Axis {
    /// Length before resizing.
    from: usize,
    /// The taps of each position after resizing: the first position before resizing, and the weights from it on.
    taps: Vec<(usize, Vec<f32>)>,
}

impl Axis {
    fn new(from: usize, to: usize, filter: Filter) -> Self {
        let scale = from as f64 / to as f64;
        let taps = (0..to).map(|i| {
            let centre = scale * (i as f64 + 0.5);
            match filter {
                Filter::Nearest => ((centre as usize).min(from.saturating_sub(1)), vec![1.0]),
                Filter::PlainBilinear | Filter::PlainBicubic => neighbour_taps(centre, from, filter),
                _ => widened_taps(centre, scale.max(1.0), from, filter),
            }
        });
        Self { from, taps: taps.collect() }
    }

    /// Length after resizing.
    fn to(&self) -> usize {
        self.taps.len()
    }
}

/// Returns the first pixel and the weights within the filter's reach, which is multiplied by `widening`. Pixels beyond
/// the edge are left out.
fn widened_taps(centre: f64, widening: f64, from: usize, filter: Filter) -> (usize, Vec<f32>) {
    let reach = filter.reach() * widening;
    let first = (centre - reach + 0.5).max(0.0) as usize;
    let end = ((centre + reach + 0.5) as usize).min(from);
    let weights: Vec<f64> = (first..end).map(|j| filter.weight((j as f64 - centre + 0.5) / widening)).collect();
    let total: f64 = weights.iter().sum();
    (first, weights.iter().map(|w| (w / total) as f32).collect())
}

/// Returns the first pixel and the weights of the two or four nearest pixels. Beyond the edge, the last pixel is
/// repeated.
fn neighbour_taps(centre: f64, from: usize, filter: Filter) -> (usize, Vec<f32>) {
    let (at, reach) = (centre - 0.5, filter.reach() as i64);
    let below = at.floor() as i64;
    let clamped = |j: i64| j.clamp(0, from as i64 - 1) as usize;
    let (first, last) = (clamped(below - reach + 1), clamped(below + reach));
    let mut weights = vec![0.0; last - first + 1];
    for j in below - reach + 1..=below + reach {
        weights[clamped(j) - first] += filter.weight(at - j as f64) as f32;
    }
    (first, weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values in [-1, 1] without a pattern, determined by the seed.
    fn noise(seed: u64, count: usize) -> Vec<f32> {
        (0..count as u64).map(|i| ((i * i + 7 * i + seed) as f32 * 12.9898).sin()).collect()
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }

    const FILTERS: [Filter; 7] = [
        Filter::Nearest,
        Filter::Box,
        Filter::Bilinear,
        Filter::Bicubic,
        Filter::Lanczos,
        Filter::PlainBilinear,
        Filter::PlainBicubic,
    ];

    #[test]
    fn pullback_is_the_transpose_of_the_resize() {
        for filter in FILTERS {
            for (from, to) in [([20, 31], [7, 9]), ([5, 8], [12, 30]), ([16, 10], [8, 20]), ([1, 1], [3, 2])] {
                let resize = Resize::new(from, to, filter);
                let (picture, cotangent) = (noise(1, 3 * from[0] * from[1]), noise(2, 3 * to[0] * to[1]));
                let (a, b) = (dot(&resize.forward(&picture), &cotangent), dot(&picture, &resize.pull(&cotangent)));
                assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{filter:?} {from:?} {to:?}: {a} {b}");
            }
        }
    }

    #[test]
    fn gradient_matches_finite_differences() {
        let resize = Resize::new([9, 7], [5, 11], Filter::Bilinear);
        let (picture, cotangent, direction) = (noise(3, 63), noise(4, 55), noise(5, 63));
        let value = |step: f32| {
            let moved: Vec<f32> = picture.iter().zip(&direction).map(|(p, d)| p + step * d).collect();
            dot(&resize.forward(&moved), &cotangent)
        };
        let (numeric, exact) = (value(0.5) - value(-0.5), dot(&direction, &resize.pull(&cotangent)));
        assert!((numeric - exact).abs() < 1e-5 * exact.abs().max(1.0), "{numeric} {exact}");
    }

    #[test]
    fn constants_stay_constant_and_an_equal_size_copies_the_picture() {
        for filter in FILTERS {
            let constant = Resize::new([10, 13], [4, 29], filter).forward(&[0.25; 130]);
            assert!(constant.iter().all(|v| (v - 0.25).abs() < 1e-6), "{filter:?}");
            let picture = noise(6, 130);
            let copy = Resize::new([10, 13], [10, 13], filter).forward(&picture);
            assert!(copy.iter().zip(&picture).all(|(a, b)| (a - b).abs() < 1e-6), "{filter:?}");
        }
    }
}
