//! Bilinear resizing with antialiasing, linear in the picture, with its transpose.

/// Resizes planes. When shrinking, the triangle filter widens with the scale; pixel centres lie at half numbers (the
/// convention of torchvision's `resize(antialias=True)` and of Pillow).
#[derive(Clone, Debug)]
pub struct Resize {
    rows: Axis,
    columns: Axis,
}

impl Resize {
    /// From `[height, width]` to `[height, width]`.
    pub fn new(from: [usize; 2], to: [usize; 2]) -> Self {
        Self { rows: Axis::new(from[0], to[0]), columns: Axis::new(from[1], to[1]) }
    }

    /// Resizes every plane of `planes`.
    ///
    /// # Panics
    /// When `planes` is not a whole number of planes.
    pub fn forward(&self, planes: &[f32]) -> Vec<f32> {
        let (rows, columns) = (&self.rows, &self.columns);
        assert_eq!(planes.len() % (rows.from * columns.from).max(1), 0, "planes of {} x {}", rows.from, columns.from);
        // Columns first: the rows of a plane stay contiguous for the second pass.
        let mut narrow = vec![0.0; planes.len() / columns.from.max(1) * columns.to()];
        for (row, out) in planes.chunks_exact(columns.from).zip(narrow.chunks_exact_mut(columns.to())) {
            for (out, (first, weights)) in out.iter_mut().zip(&columns.taps) {
                *out = row[*first..].iter().zip(weights).map(|(v, w)| v * w).sum();
            }
        }
        let width = columns.to();
        let mut out = vec![0.0; narrow.len() / rows.from.max(1) * rows.to()];
        for (plane, out) in narrow.chunks_exact(rows.from * width).zip(out.chunks_exact_mut(rows.to() * width)) {
            for (out, (first, weights)) in out.chunks_exact_mut(width).zip(&rows.taps) {
                for (row, weight) in plane[first * width..].chunks_exact(width).zip(weights) {
                    out.iter_mut().zip(row).for_each(|(o, v)| *o += v * weight);
                }
            }
        }
        out
    }

    /// The cotangent of the planes, given that of the resized planes.
    ///
    /// # Panics
    /// When `cotangent` is not a whole number of resized planes.
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
        let mut tall = vec![0.0; cotangent.len() / rows.to().max(1) * rows.from];
        for (plane, cotangent) in
            tall.chunks_exact_mut(rows.from * width).zip(cotangent.chunks_exact(rows.to() * width))
        {
            for (cotangent, (first, weights)) in cotangent.chunks_exact(width).zip(&rows.taps) {
                for (row, weight) in plane[first * width..].chunks_exact_mut(width).zip(weights) {
                    row.iter_mut().zip(cotangent).for_each(|(r, c)| *r += c * weight);
                }
            }
        }
        let mut out = vec![0.0; tall.len() / width.max(1) * columns.from];
        for (row, cotangent) in out.chunks_exact_mut(columns.from).zip(tall.chunks_exact(width)) {
            for (cotangent, (first, weights)) in cotangent.iter().zip(&columns.taps) {
                row[*first..].iter_mut().zip(weights).for_each(|(r, w)| *r += cotangent * w);
            }
        }
        out
    }
}

/// One axis: for each output position the first input position and the weights from there.
#[derive(Clone, Debug)]
struct Axis {
    from: usize,
    taps: Vec<(usize, Vec<f32>)>,
}

impl Axis {
    fn new(from: usize, to: usize) -> Self {
        let scale = from as f64 / to as f64;
        let reach = scale.max(1.0);
        let taps = (0..to).map(|i| {
            let centre = scale * (i as f64 + 0.5);
            let first = (centre - reach + 0.5).max(0.0) as usize;
            let end = ((centre + reach + 0.5) as usize).min(from);
            let weight = |j: usize| (1.0 - ((j as f64 - centre + 0.5) / reach).abs()).max(0.0);
            let total: f64 = (first..end).map(weight).sum();
            (first, (first..end).map(|j| (weight(j) / total) as f32).collect())
        });
        Self { from, taps: taps.collect() }
    }

    fn to(&self) -> usize {
        self.taps.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insightface::gradient_check::{dot, noise};

    #[test]
    fn the_pull_is_the_transpose_of_the_resize() {
        for (from, to) in [([20, 31], [7, 9]), ([5, 8], [12, 30]), ([16, 10], [8, 20]), ([1, 1], [3, 2])] {
            let resize = Resize::new(from, to);
            let (picture, cotangent) = (noise(1, 3 * from[0] * from[1]), noise(2, 3 * to[0] * to[1]));
            let (a, b) = (dot(&resize.forward(&picture), &cotangent), dot(&picture, &resize.pull(&cotangent)));
            assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{from:?} {to:?}: {a} {b}");
        }
    }

    #[test]
    fn the_gradient_agrees_with_central_differences() {
        let resize = Resize::new([9, 7], [5, 11]);
        let (picture, cotangent, direction) = (noise(3, 63), noise(4, 55), noise(5, 63));
        let value = |step: f32| {
            let moved: Vec<f32> = picture.iter().zip(&direction).map(|(p, d)| p + step * d).collect();
            dot(&resize.forward(&moved), &cotangent)
        };
        let (numeric, exact) = (value(0.5) - value(-0.5), dot(&direction, &resize.pull(&cotangent)));
        assert!((numeric - exact).abs() < 1e-5 * exact.abs().max(1.0), "{numeric} {exact}");
    }

    #[test]
    fn a_constant_stays_constant_and_the_same_size_copies() {
        let constant = Resize::new([10, 13], [4, 29]).forward(&[0.25; 130]);
        assert!(constant.iter().all(|v| (v - 0.25).abs() < 1e-6));
        let picture = noise(6, 130);
        assert_eq!(Resize::new([10, 13], [10, 13]).forward(&picture), picture);
    }
}
