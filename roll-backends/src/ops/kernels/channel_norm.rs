//! The RMS norm of the Wan VAE over the channels of `[C, positions]`, on the CPU.
//!
//! Positions are contiguous in memory, so a task takes a block of positions, with the channels as the outer loop: one
//! read of the block for the norm and one, from the cache, for the result.

use rayon::prelude::*;

use super::matrix::ViewMut;
use super::parallel::{ELEMENT_COST, min_items_per_task};
use super::simd::{sigmoid, vectorised};

/// Positions per task.
const POSITIONS: usize = 256;

/// Lower bound of the norm that x is divided by.
const MIN_NORM: f32 = 1e-12;

/// Returns `y = x / max(|x|, MIN_NORM) * sqrt(C) * gain` with `C = gain.len()`, or `y * sigmoid(y)` if `has_silu`, and
/// the factor `sqrt(C) / max(|x|, MIN_NORM)` of each position.
pub fn forward(x: &[f32], gain: &[f32], has_silu: bool) -> (Vec<f32>, Vec<f32>) {
    let channels = gain.len();
    let positions = x.len() / channels.max(1);
    let mut y = vec![0.0; x.len()];
    let mut factors = vec![0.0; positions];
    let tasks =
        position_blocks(&mut y, channels, positions).into_par_iter().zip(factors.par_chunks_mut(POSITIONS)).enumerate();
    tasks.with_min_len(min_items_per_task(POSITIONS * channels * ELEMENT_COST)).for_each(|(task, (mut y, factors))| {
        // The task's positions of one channel.
        let x_of = |c: usize| &x[c * positions + task * POSITIONS..][..task_len(positions, task)];
        (0..channels).for_each(|c| add_square(x_of(c), factors));
        factors_of_squares(factors, (channels as f32).sqrt());
        for c in 0..channels {
            if has_silu {
                scale_silu(x_of(c), factors, gain[c], y.row(c));
            } else {
                scale(x_of(c), factors, gain[c], y.row(c));
            }
        }
    });
    (y, factors)
}

/// Returns the gradients of x and gain; `None` if not wanted.
pub fn backward(
    x: &[f32],
    gain: &[f32],
    factors: &[f32],
    d_y: &[f32],
    has_silu: bool,
    [x_wanted, gain_wanted]: [bool; 2],
) -> [Option<Vec<f32>>; 2] {
    let channels = gain.len();
    let positions = factors.len();
    let mut d_x = vec![0.0; if x_wanted { x.len() } else { 0 }];
    let outputs: Vec<_> = if x_wanted {
        position_blocks(&mut d_x, channels, positions).into_iter().map(Some).collect()
    } else {
        (0..positions.div_ceil(POSITIONS)).map(|_| None).collect()
    };
    // The factor where the norm is at or below `MIN_NORM`. It does not depend on x there.
    let clamped_factor = (channels as f32).sqrt() / MIN_NORM;
    let d_gain_parts: Vec<Vec<f32>> = outputs
        .into_par_iter()
        .with_min_len(min_items_per_task(POSITIONS * channels * 2 * ELEMENT_COST))
        .enumerate()
        .map(|(task, d_x)| {
            let n = task_len(positions, task);
            // The task's positions of one channel.
            let at = |c: usize| c * positions + task * POSITIONS..c * positions + task * POSITIONS + n;
            let factors = &factors[task * POSITIONS..][..n];
            // The sum over channels of `x * gain * d_pre`, where `d_pre` is the cotangent before SiLU.
            let mut products = [0.0; POSITIONS];
            let mut d_pre = [0.0; POSITIONS];
            let mut d_gain = vec![0.0; if gain_wanted { channels } else { 0 }];
            let write_d_pre = |c: usize, d_pre: &mut [f32]| {
                if has_silu {
                    silu_cotangent(&x[at(c)], factors, gain[c], &d_y[at(c)], d_pre);
                } else {
                    d_pre.copy_from_slice(&d_y[at(c)]);
                }
            };
            for c in 0..channels {
                write_d_pre(c, &mut d_pre[..n]);
                add_product(&x[at(c)], &d_pre[..n], gain[c], &mut products[..n]);
                if gain_wanted {
                    d_gain[c] = dot3(&x[at(c)], factors, &d_pre[..n]);
                }
            }
            if let Some(mut d_x) = d_x {
                make_radial(&mut products[..n], factors, channels as f32, clamped_factor);
                let radial = &products[..n];
                for c in 0..channels {
                    write_d_pre(c, &mut d_pre[..n]);
                    scale_backward(&x[at(c)], factors, gain[c], &d_pre[..n], radial, d_x.row(c));
                }
            }
            d_gain
        })
        .collect();
    let d_gain = gain_wanted.then(|| {
        let mut sums = vec![0.0f64; channels];
        for part in &d_gain_parts {
            sums.iter_mut().zip(part).for_each(|(sum, &value)| *sum += f64::from(value));
        }
        sums.into_iter().map(|sum| sum as f32).collect()
    });
    [x_wanted.then_some(d_x), d_gain]
}

/// Number of positions of a task.
fn task_len(positions: usize, task: usize) -> usize {
    POSITIONS.min(positions - task * POSITIONS)
}

/// The part of `data` `[channels, positions]` that each task writes.
fn position_blocks(data: &mut [f32], channels: usize, positions: usize) -> Vec<ViewMut<'_>> {
    ViewMut::new(data, channels, positions).split_columns(POSITIONS)
}

vectorised! {
    fn add_square<M>(x: &[f32], sum: &mut [f32]) {
        for (sum, &x) in sum.iter_mut().zip(x) {
            *sum = M::mul_add(x, x, *sum);
        }
    }

    /// Turns sums of squares into `root / max(norm, MIN_NORM)`.
    fn factors_of_squares<M>(sums: &mut [f32], root: f32) {
        for sum in sums {
            *sum = root / sum.sqrt().max(MIN_NORM);
        }
    }

    fn scale<M>(x: &[f32], factors: &[f32], gain: f32, y: &mut [f32]) {
        for ((y, &x), &factor) in y.iter_mut().zip(x).zip(factors) {
            *y = x * factor * gain;
        }
    }

    fn scale_silu<M>(x: &[f32], factors: &[f32], gain: f32, y: &mut [f32]) {
        for ((y, &x), &factor) in y.iter_mut().zip(x).zip(factors) {
            let pre = x * factor * gain;
            *y = pre * sigmoid::<M>(pre);
        }
    }

    /// Writes the cotangent before SiLU to `d_pre`.
    fn silu_cotangent<M>(x: &[f32], factors: &[f32], gain: f32, d_y: &[f32], d_pre: &mut [f32]) {
        for (((d_pre, &x), &factor), &d_y) in d_pre.iter_mut().zip(x).zip(factors).zip(d_y) {
            let pre = x * factor * gain;
            let (s, one_minus_s) = (sigmoid::<M>(pre), sigmoid::<M>(-pre));
            *d_pre = d_y * M::mul_add(pre, s * one_minus_s, s);
        }
    }

    /// Adds `x * y * factor` to `sum`.
    fn add_product<M>(x: &[f32], y: &[f32], factor: f32, sum: &mut [f32]) {
        for ((sum, &x), &y) in sum.iter_mut().zip(x).zip(y) {
            *sum = M::mul_add(x * factor, y, *sum);
        }
    }

    /// Turns `sum(x * gain * d_pre)` into the part of the gradient of x that is proportional to x, divided by x:
    /// `sum * factor^3 / C`, or 0 if the norm was clamped.
    fn make_radial<M>(products: &mut [f32], factors: &[f32], channels: f32, clamped_factor: f32) {
        for (product, &factor) in products.iter_mut().zip(factors) {
            let factor = if factor < clamped_factor { factor } else { 0.0 };
            *product = *product * factor / channels * factor * factor;
        }
    }

    /// Writes the gradient of x, `d_pre * gain * factor - x * radial`.
    fn scale_backward<M>(x: &[f32], factors: &[f32], gain: f32, d_pre: &[f32], radial: &[f32], d_x: &mut [f32]) {
        for ((((d_x, &x), &factor), &d_pre), &radial) in d_x.iter_mut().zip(x).zip(factors).zip(d_pre).zip(radial) {
            *d_x = M::mul_add(d_pre * gain, factor, -(x * radial));
        }
    }
}

/// Sum of `a b c`.
fn dot3(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    a.iter().zip(b).zip(c).map(|((&a, &b), &c)| f64::from(a * b) * f64::from(c)).sum::<f64>() as f32
}
