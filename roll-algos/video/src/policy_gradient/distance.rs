//! Mean squared difference of two predictions, and its gradient.

use super::LossMask;

/// `mean((a - b)^2)` over the positions of `mask`.
pub fn squared(a: &[f32], b: &[f32], mask: LossMask) -> f64 {
    mask.mean(|i| (f64::from(a[i]) - f64::from(b[i])).powi(2))
}

/// Adds the gradient of `weight * mean((a - b)^2)` with respect to `a` to `gradient`.
pub fn add_squared_gradient(gradient: &mut [f64], weight: f64, a: &[f32], b: &[f32], mask: LossMask) {
    let factor = 2.0 * weight / mask.count() as f64;
    mask.positions().for_each(|i| gradient[i] += factor * (f64::from(a[i]) - f64::from(b[i])));
}
