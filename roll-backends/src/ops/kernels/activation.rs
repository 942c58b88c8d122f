//! Elementwise activations and their derivatives.

use rayon::prelude::*;

use super::parallel::{ELEMENT_COST, min_items_per_task};
use super::simd::{MulAdd, exp, sigmoid, vectorised};
use crate::ops::Activation;

/// Elements per task: enough to outweigh the cost of a task, few enough to stay in the cache.
const CHUNK: usize = 1 << 14;
/// Cost of a chunk in multiply-adds: an exponential costs about as much as reading and writing the element.
const CHUNK_COST: usize = CHUNK * 2 * ELEMENT_COST;

/// The activation of each element.
pub fn forward(activation: Activation, x: &[f32]) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    let chunks = y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK));
    chunks.with_min_len(min_items_per_task(CHUNK_COST)).for_each(|(y, x)| match activation {
        Activation::Gelu => gelu(x, y),
        Activation::GeluTanh => gelu_tanh(x, y),
        Activation::Silu => silu(x, y),
    });
    y
}

/// The gradient of `x`, given the cotangent of the result.
pub fn backward(activation: Activation, x: &[f32], d_y: &[f32]) -> Vec<f32> {
    let mut d_x = vec![0.0; x.len()];
    let chunks = d_x.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).zip(d_y.par_chunks(CHUNK));
    chunks.with_min_len(min_items_per_task(CHUNK_COST)).for_each(|((d_x, x), d_y)| match activation {
        Activation::Gelu => gelu_backward(x, d_y, d_x),
        Activation::GeluTanh => gelu_tanh_backward(x, d_y, d_x),
        Activation::Silu => silu_backward(x, d_y, d_x),
    });
    d_x
}

/// Returns the CDF and the density of the standard normal distribution at `x`, for `|x|` at most [`FAR`].
///
/// Formula 7.1.26 of Abramowitz and Stegun, applied so that the tail below zero keeps its relative precision.
#[inline(always)]
fn normal_cdf_and_density<M: MulAdd>(x: f32) -> (f32, f32) {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / M::mul_add(0.327_591_1, z, 1.0);
    let p = M::mul_add(1.061_405_4, t, -1.453_152);
    let p = M::mul_add(p, t, 1.421_413_7);
    let p = M::mul_add(p, t, -0.284_496_74);
    let p = M::mul_add(p, t, 0.254_829_6);
    let e = exp::<M>(-z * z);
    let tail = 0.5 * p * t * e;
    (if x < 0.0 { tail } else { 1.0 - tail }, e * NORMAL_DENSITY)
}

/// `1 / sqrt(2 pi)`.
const NORMAL_DENSITY: f32 = 0.398_942_3;

/// Beyond this magnitude tail and density are zero in f32.
const FAR: f32 = 40.0;

/// Keeps squares of `x` in range. NaN stays NaN.
#[inline(always)]
fn clamp_far(x: f32) -> f32 {
    let x = if x > FAR { FAR } else { x };
    if x < -FAR { -FAR } else { x }
}

vectorised! {
    fn gelu<M>(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            let (cdf, _) = normal_cdf_and_density::<M>(clamp_far(x));
            // Negative infinity times a tail of zero would be NaN.
            *y = if x < -FAR { 0.0 } else { x * cdf };
        }
    }

    fn gelu_backward<M>(x: &[f32], d_y: &[f32], d_x: &mut [f32]) {
        for ((d_x, &x), &d_y) in d_x.iter_mut().zip(x).zip(d_y) {
            let x = clamp_far(x);
            let (cdf, density) = normal_cdf_and_density::<M>(x);
            *d_x = d_y * M::mul_add(x, density, cdf);
        }
    }
}

// GELU's tanh form is x * (1 + tanh(u)) / 2 = x * sigmoid(2u), with 2u = x * (LINEAR + CUBIC * x^2).
/// `2 sqrt(2 / pi)`.
const LINEAR: f32 = 1.595_769_1;
/// `0.044715 * 2 sqrt(2 / pi)`.
const CUBIC: f32 = 0.071_354_816;

/// A magnitude far beyond which the sigmoid is 0 or 1, and whose third power is finite.
const BOUND: f32 = 1e4;

/// Keeps powers of `x` finite. NaN stays NaN.
#[inline(always)]
fn bounded(x: f32) -> f32 {
    let x = if x > BOUND { BOUND } else { x };
    if x < -BOUND { -BOUND } else { x }
}

/// The argument of the sigmoid, for a bounded `x`.
#[inline(always)]
fn gelu_argument<M: MulAdd>(x: f32) -> f32 {
    x * M::mul_add(CUBIC, x * x, LINEAR)
}

vectorised! {
    fn gelu_tanh<M>(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * sigmoid::<M>(gelu_argument::<M>(bounded(x)));
        }
    }

    fn gelu_tanh_backward<M>(x: &[f32], d_y: &[f32], d_x: &mut [f32]) {
        for ((d_x, &x), &d_y) in d_x.iter_mut().zip(x).zip(d_y) {
            let x = bounded(x);
            let u = gelu_argument::<M>(x);
            // 1 - s as a sigmoid, because the difference would lose precision where it is small.
            let (s, one_minus_s) = (sigmoid::<M>(u), sigmoid::<M>(-u));
            let du_dx = M::mul_add(3.0 * CUBIC, x * x, LINEAR);
            *d_x = d_y * M::mul_add(x * du_dx, s * one_minus_s, s);
        }
    }

    fn silu<M>(x: &[f32], y: &mut [f32]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x * sigmoid::<M>(x);
        }
    }

    fn silu_backward<M>(x: &[f32], d_y: &[f32], d_x: &mut [f32]) {
        for ((d_x, &x), &d_y) in d_x.iter_mut().zip(x).zip(d_y) {
            let (s, one_minus_s) = (sigmoid::<M>(x), sigmoid::<M>(-x));
            *d_x = d_y * M::mul_add(x, s * one_minus_s, s);
        }
    }
}
