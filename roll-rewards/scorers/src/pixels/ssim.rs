//! Structural similarity (Wang, Bovik, Sheikh and Simoncelli, 2004) of two planes, with its gradient.

/// Standard deviation of the window, in pixels.
const SIGMA: f64 = 1.5;
/// Side of the window in pixels; at most the side of the picture.
const WINDOW: usize = 11;
/// The constants C1 and C2 of the paper for values in a range of length 1.
const C1: f32 = 0.01 * 0.01;
const C2: f32 = 0.03 * 0.03;

/// The mean structural similarity of the planes `x` and `y` over all complete windows, and its gradient with respect to
/// `x`. Planes are `[height, width]` with values in a range of length 1.
pub fn ssim(x: &[f32], y: &[f32], [height, width]: [usize; 2]) -> (f64, Vec<f32>) {
    let window = Window::new([height, width]);
    let times = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).collect::<Vec<f32>>();
    // Means in each window, named by their argument: mxy is the mean of x y.
    let [mx, my] = [x, y].map(|plane| window.mean(plane));
    let [mxx, myy, mxy] = [times(x, x), times(y, y), times(x, y)].map(|plane| window.mean(&plane));
    let count = mx.len();
    let (mut sum, mut slopes) = (0.0, [vec![0.0; count], vec![0.0; count], vec![0.0; count]]);
    for i in 0..count {
        // Variances and covariance.
        let (vx, vy, vxy) = (mxx[i] - mx[i] * mx[i], myy[i] - my[i] * my[i], mxy[i] - mx[i] * my[i]);
        // The two factors of the numerator and of the denominator.
        let (a1, a2) = (2.0 * mx[i] * my[i] + C1, 2.0 * vxy + C2);
        let (b1, b2) = (mx[i] * mx[i] + my[i] * my[i] + C1, vx + vy + C2);
        let value = a1 * a2 / (b1 * b2);
        sum += f64::from(value);
        // Derivatives of the value with respect to the window's means of x, x^2 and x y.
        slopes[0][i] = (2.0 * my[i] * (a2 - a1) / b2 + 2.0 * mx[i] * value * (b1 / b2 - 1.0)) / b1;
        slopes[1][i] = -value / b2;
        slopes[2][i] = 2.0 * a1 / (b1 * b2);
    }
    let [in_x, in_xx, in_xy] = slopes.map(|slope| window.pull(&slope));
    let total = |i: usize| (in_x[i] + 2.0 * x[i] * in_xx[i] + y[i] * in_xy[i]) / count as f32;
    (sum / count as f64, (0..x.len()).map(total).collect())
}

/// A separable Gaussian window that slides over a plane.
struct Window {
    /// `[height, width]` of the plane.
    size: [usize; 2],
    /// Weights along height and width, each of sum 1.
    weights: [Vec<f32>; 2],
}

impl Window {
    /// The window for planes of this size.
    fn new(size: [usize; 2]) -> Self {
        let gaussian = |n: usize| {
            let centre = (n as f64 - 1.0) / 2.0;
            let weight = |i: usize| (-(i as f64 - centre).powi(2) / (2.0 * SIGMA * SIGMA)).exp();
            let total: f64 = (0..n).map(weight).sum();
            (0..n).map(|i| (weight(i) / total) as f32).collect()
        };
        Self { size, weights: size.map(|side| gaussian(side.min(WINDOW))) }
    }

    /// Numbers of complete windows along height and width.
    fn window_counts(&self) -> [usize; 2] {
        [0, 1].map(|i| self.size[i] + 1 - self.weights[i].len())
    }

    /// The weighted mean in each window.
    fn mean(&self, plane: &[f32]) -> Vec<f32> {
        let ([height, width], [rows, columns]) = (self.size, self.window_counts());
        let mut narrow = vec![0.0; height * columns];
        for (row, narrow_row) in plane.chunks_exact(width).zip(narrow.chunks_exact_mut(columns)) {
            for (k, weight) in self.weights[1].iter().enumerate() {
                narrow_row.iter_mut().zip(&row[k..]).for_each(|(o, v)| *o += weight * v);
            }
        }
        let mut out = vec![0.0; rows * columns];
        for (y, out_row) in out.chunks_exact_mut(columns).enumerate() {
            for (k, weight) in self.weights[0].iter().enumerate() {
                out_row.iter_mut().zip(&narrow[(y + k) * columns..]).for_each(|(o, v)| *o += weight * v);
            }
        }
        out
    }

    /// The transpose of [`Window::mean`].
    fn pull(&self, cotangent: &[f32]) -> Vec<f32> {
        let ([height, width], [_, columns]) = (self.size, self.window_counts());
        let mut narrow = vec![0.0; height * columns];
        for (y, row) in cotangent.chunks_exact(columns).enumerate() {
            for (k, weight) in self.weights[0].iter().enumerate() {
                narrow[(y + k) * columns..].iter_mut().zip(row).for_each(|(n, g)| *n += weight * g);
            }
        }
        let mut out = vec![0.0; height * width];
        for (row, out_row) in narrow.chunks_exact(columns).zip(out.chunks_exact_mut(width)) {
            for (k, weight) in self.weights[1].iter().enumerate() {
                out_row[k..].iter_mut().zip(row).for_each(|(o, g)| *o += weight * g);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient_check::{dot, noise};

    fn planes(size: [usize; 2]) -> [Vec<f32>; 2] {
        [1, 2].map(|seed| noise(seed, size[0] * size[1]).iter().map(|v| 0.5 + 0.4 * v).collect())
    }

    /// The definition, window by window in f64.
    fn naive(x: &[f32], y: &[f32], [h, w]: [usize; 2]) -> f64 {
        let weight = |k: usize| (-(k as f64 - 5.0).powi(2) / 4.5).exp();
        let total: f64 = (0..11).map(weight).sum();
        let (mut sum, mut count) = (0.0, 0.0);
        for (top, left) in (0..h - 10).flat_map(|y| (0..w - 10).map(move |x| (y, x))) {
            let mean = |f: &dyn Fn(f64, f64) -> f64| {
                let cells = (0..11).flat_map(|i| (0..11).map(move |j| (i, j)));
                let each = |(i, j): (usize, usize)| {
                    let at = (top + i) * w + left + j;
                    weight(i) * weight(j) / (total * total) * f(f64::from(x[at]), f64::from(y[at]))
                };
                cells.map(each).sum::<f64>()
            };
            let (mx, my) = (mean(&|a, _| a), mean(&|_, b| b));
            let vx = mean(&|a, _| (a - mx) * (a - mx));
            let vy = mean(&|_, b| (b - my) * (b - my));
            let vxy = mean(&|a, b| (a - mx) * (b - my));
            sum += (2.0 * mx * my + 1e-4) * (2.0 * vxy + 9e-4) / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4));
            count += 1.0;
        }
        sum / count
    }

    #[test]
    fn ssim_matches_the_definition() {
        let size = [15, 19];
        let [x, y] = planes(size);
        assert!((ssim(&x, &y, size).0 - naive(&x, &y, size)).abs() < 1e-5);
        assert!((ssim(&x, &x, size).0 - 1.0).abs() < 1e-5);
    }

    #[test]
    fn gradient_matches_finite_differences() {
        for size in [[15, 19], [4, 6], [1, 1]] {
            let [x, y] = planes(size);
            let along = noise(3, x.len());
            let moved = |step: f32| {
                let x: Vec<f32> = x.iter().zip(&along).map(|(x, a)| x + step * a).collect();
                ssim(&x, &y, size).0
            };
            let (numeric, exact) = ((moved(5e-3) - moved(-5e-3)) / 1e-2, dot(&ssim(&x, &y, size).1, &along));
            assert!((numeric - exact).abs() < 1e-2 * exact.abs().max(0.05), "{size:?}: {numeric} {exact}");
        }
    }
}
