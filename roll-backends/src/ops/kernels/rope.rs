//! Rotary position embedding of adjacent pairs, on the CPU.

use super::rows::for_rows;
use super::simd::vectorised;
use crate::ops::Direction;

/// Rotates the adjacent pairs of each head of `x` `[rows, heads * 2 * half]`, in `direction`, by angles with the given
/// cosines and sines, `[rows, half]`.
pub fn rotate(x: &[f32], cos: &[f32], sin: &[f32], rows: usize, heads: usize, direction: Direction) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    let width = x.len() / rows.max(1);
    let half = width / heads.max(1) / 2;
    if half == 0 {
        return y;
    }
    let sign = match direction {
        Direction::Forward => 1.0,
        Direction::Back => -1.0,
    };
    for_rows(&mut y, rows, |i, y| {
        let angles = i * half..(i + 1) * half;
        rotate_row(&x[i * width..][..width], &cos[angles.clone()], &sin[angles], sign, y);
    });
    y
}

vectorised! {
    fn rotate_row<M>(x: &[f32], cos: &[f32], sin: &[f32], sign: f32, y: &mut [f32]) {
        let width = 2 * cos.len();
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let pairs = x.as_chunks::<2>().0.iter().zip(y.as_chunks_mut::<2>().0);
            for (((x, y), &cos), &sin) in pairs.zip(cos).zip(sin) {
                let sin = sin * sign;
                *y = [M::mul_add(x[0], cos, -(x[1] * sin)), M::mul_add(x[0], sin, x[1] * cos)];
            }
        }
    }
}
