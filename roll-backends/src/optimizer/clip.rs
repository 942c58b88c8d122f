//! Gradient clipping by global norm.

use rayon::prelude::*;

use super::BLOCK;

/// The sum of squares in f64, over blocks of a fixed size, added in order. Squares of f32 cannot overflow f64, so the
/// sum is finite exactly if every value is.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    let blocks: Vec<f64> = values.par_chunks(BLOCK).map(block_sum).collect();
    blocks.iter().sum()
}

/// Sums with eight accumulators, so that the compiler vectorises the loop.
fn block_sum(block: &[f32]) -> f64 {
    let mut lanes = [0f64; 8];
    let (eights, rest) = block.as_chunks::<8>();
    for eight in eights {
        for (lane, value) in lanes.iter_mut().zip(eight) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()
}

/// The Euclidean norm.
pub fn norm(values: &[f32]) -> f64 {
    sum_of_squares(values).sqrt()
}

/// Added to the norm before the division, as in PyTorch.
const NORM_EPS: f64 = 1e-6;

/// The clipping factor for a gradient of norm `norm`: `min(1, max_norm / (norm + NORM_EPS))` as in PyTorch; 1 if
/// `max_norm` is 0 (clipping is off).
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    if max_norm > 0.0 { (max_norm / (norm + NORM_EPS)).min(1.0) } else { 1.0 }
}

/// Multiplies all values by `factor`.
pub fn scale(values: &mut [f32], factor: f64) {
    if factor != 1.0 {
        let factor = factor as f32;
        values.par_chunks_mut(BLOCK).for_each(|block| block.iter_mut().for_each(|v| *v *= factor));
    }
}

/// Sets all values to 0.
pub fn clear(values: &mut [f32]) {
    values.par_chunks_mut(BLOCK).for_each(|block| block.fill(0.0));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_norm_does_not_depend_on_the_number_of_threads() {
        let values: Vec<f32> = (0..5 * BLOCK + 3).map(|i| (i as f32).sin()).collect();
        let on = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap().install(|| norm(&values));
        assert_eq!(on(1).to_bits(), on(4).to_bits());
    }

    #[test]
    fn the_norm_is_finite_exactly_when_every_value_is() {
        assert!(norm(&[f32::MAX; 100]).is_finite());
        assert!(!norm(&[1.0, f32::NAN]).is_finite());
        assert!(!norm(&[1.0, f32::NEG_INFINITY]).is_finite());
    }

    #[test]
    fn clipping_only_shrinks_and_zero_disables_it() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert!((clip_coefficient(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_coefficient(1e9, 0.0), 1.0);
    }
}
