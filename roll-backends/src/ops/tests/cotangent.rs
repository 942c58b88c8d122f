//! Tests of seeds of a backward pass.

use super::{assert_near, devices, download, noise};
use crate::ops::seed;

#[test]
fn seeded_gradients_match_a_weighted_sum() {
    let (x, weights) = (noise(4, 5, 1), noise(4, 5, 2));
    let expected: Vec<f64> = weights.values.iter().map(|w| 8.0 * w).collect();
    for device in devices() {
        let leaf = x.upload(&device).autodiff().require_grad();
        let (a, b) = (leaf.clone() * 3.0, leaf.clone() * 5.0);
        let mut g = (seed(a, weights.upload(&device)) + seed(b, weights.upload(&device))).backward();
        assert_near("seed", &download(leaf.grad_remove(&mut g).unwrap()), &expected, 1e-6);
    }
}
