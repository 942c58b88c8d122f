//! Layer norm and RMS norm over the rows of a matrix, and the gated residual, on the CPU.

use rayon::prelude::*;

use super::parallel::{ELEMENT_COST, min_items_per_task};
use super::rows::{RowOperand, for_rows, rows_per_task, sum_rows};
use super::simd::{LANES, sum_lanes, vectorised};

/// Mean and inverse standard deviation of a row; the mean of an RMS norm is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowMoments {
    /// The mean, or 0.
    pub mean: f32,
    /// The reciprocal of the standard deviation or root mean square.
    pub inverse: f32,
}

/// Returns `(x - mean) * inverse * gain + shift` and the moments of each row. Without a shift, it is an RMS norm.
pub fn forward(
    x: &[f32],
    rows: usize,
    gain: RowOperand,
    shift: Option<RowOperand>,
    eps: f64,
) -> (Vec<f32>, Vec<RowMoments>) {
    let mut y = vec![0.0; x.len()];
    let mut moments = vec![RowMoments::default(); rows];
    let width = x.len() / rows.max(1);
    if x.is_empty() {
        return (y, moments);
    }
    let is_layer_norm = shift.is_some();
    let step = rows_per_task(width);
    let tasks = y.par_chunks_mut(step * width).zip(moments.par_chunks_mut(step)).enumerate();
    tasks.with_min_len(min_items_per_task(step * width * ELEMENT_COST)).for_each(|(task, (y, moments))| {
        for (i, (y, moments)) in y.chunks_exact_mut(width).zip(moments).enumerate() {
            let row = task * step + i;
            let x = &x[row * width..][..width];
            *moments = moments_of(x, is_layer_norm, eps);
            match shift {
                Some(shift) => normalise_and_shift(x, *moments, gain.row(row), shift.row(row), y),
                None => normalise(x, *moments, gain.row(row), y),
            }
        }
    });
    (y, moments)
}

/// The gradient of x, given the gradient of the result, for a layer norm (if `is_layer_norm`) or an RMS norm.
pub fn backward_x(is_layer_norm: bool, x: &[f32], moments: &[RowMoments], gain: RowOperand, d_y: &[f32]) -> Vec<f32> {
    let mut d_x = vec![0.0; x.len()];
    let width = x.len() / moments.len().max(1);
    for_rows(&mut d_x, moments.len(), |i, d_x| {
        let at = i * width..(i + 1) * width;
        let sums = cotangent_sums(&x[at.clone()], moments[i], gain.row(i), &d_y[at.clone()]);
        let n = width as f32;
        let mean_d_hat = if is_layer_norm { sums.d_hat / n } else { 0.0 };
        let mean_product = sums.product / n;
        normalise_backward(&x[at.clone()], moments[i], gain.row(i), &d_y[at], [mean_d_hat, mean_product], d_x);
    });
    d_x
}

/// The gradient of the gain: one row if `is_shared`, else one per row of x.
pub fn backward_gain(x: &[f32], moments: &[RowMoments], is_shared: bool, d_y: &[f32]) -> Vec<f32> {
    let rows = moments.len();
    let width = x.len() / rows.max(1);
    let add = |i: usize, sum: &mut [f32]| {
        let at = i * width..(i + 1) * width;
        add_gain_gradient(&x[at.clone()], moments[i], &d_y[at], sum);
    };
    each_or_sum(rows, width, is_shared, add)
}

/// The sum of the rows of `d_y`: the gradient of a shared shift.
pub fn sum_of_rows(rows: usize, d_y: &[f32]) -> Vec<f32> {
    let width = d_y.len() / rows.max(1);
    sum_rows(rows, width, |i, sum| add(&d_y[i * width..][..width], sum))
}

/// Returns `x + y * gate`.
pub fn gated_add(x: &[f32], y: &[f32], rows: usize, gate: RowOperand) -> Vec<f32> {
    let mut z = x.to_vec();
    for_rows(&mut z, rows, |i, z| add_product(&y[i * z.len()..][..z.len()], gate.row(i), z));
    z
}

/// The gradient of y in `x + y * gate`.
pub fn gated_add_backward_y(rows: usize, gate: RowOperand, d_z: &[f32]) -> Vec<f32> {
    let mut d_y = vec![0.0; d_z.len()];
    for_rows(&mut d_y, rows, |i, d_y| product(&d_z[i * d_y.len()..][..d_y.len()], gate.row(i), d_y));
    d_y
}

/// The gradient of the gate in `x + y * gate`: one row if `is_shared`, else one per row.
pub fn gated_add_backward_gate(rows: usize, y: &[f32], is_shared: bool, d_z: &[f32]) -> Vec<f32> {
    let width = y.len() / rows.max(1);
    each_or_sum(rows, width, is_shared, |i, sum| {
        let at = i * width..(i + 1) * width;
        add_product(&y[at.clone()], &d_z[at], sum);
    })
}

/// Calls `add(i, row)` for each row i of a zeroed matrix and returns the matrix or, if `is_shared`, adds up all rows in
/// a single one.
fn each_or_sum(rows: usize, width: usize, is_shared: bool, add: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    if is_shared {
        return sum_rows(rows, width, add);
    }
    let mut each = vec![0.0; rows * width];
    for_rows(&mut each, rows, add);
    each
}

/// Mean and inverse deviation of the row x of a layer norm (if `is_layer_norm`) or an RMS norm.
fn moments_of(x: &[f32], is_layer_norm: bool, eps: f64) -> RowMoments {
    let n = x.len() as f64;
    let mean = if is_layer_norm { (f64::from(total(x)) / n) as f32 } else { 0.0 };
    let variance = f64::from(sum_of_squares(x, mean)) / n;
    RowMoments { mean, inverse: (1.0 / (variance + eps).sqrt()) as f32 }
}

/// Sums over a row. `hat` is the normalised row, `(x - mean) * inverse`, and `d_hat` its cotangent, `d_y * gain`.
struct CotangentSums {
    d_hat: f32,
    /// Sum of `d_hat * hat`.
    product: f32,
}

vectorised! {
    /// The sum of x, in f32.
    pub fn total<M>(x: &[f32]) -> f32 {
        let mut lanes = [0.0; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += x);
        }
        sum_lanes(lanes) + rest.iter().sum::<f32>()
    }

    /// The sum of `(x - offset)^2`, in f32.
    pub fn sum_of_squares<M>(x: &[f32], offset: f32) -> f32 {
        let mut lanes = [0.0; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane = M::mul_add(x - offset, x - offset, *lane);
            }
        }
        sum_lanes(lanes) + rest.iter().map(|x| (x - offset) * (x - offset)).sum::<f32>()
    }

    fn normalise<M>(x: &[f32], moments: RowMoments, gain: &[f32], y: &mut [f32]) {
        for ((y, &x), &gain) in y.iter_mut().zip(x).zip(gain) {
            *y = (x - moments.mean) * moments.inverse * gain;
        }
    }

    fn normalise_and_shift<M>(x: &[f32], moments: RowMoments, gain: &[f32], shift: &[f32], y: &mut [f32]) {
        for (((y, &x), &gain), &shift) in y.iter_mut().zip(x).zip(gain).zip(shift) {
            *y = M::mul_add((x - moments.mean) * moments.inverse, gain, shift);
        }
    }

    fn cotangent_sums<M>(x: &[f32], moments: RowMoments, gain: &[f32], d_y: &[f32]) -> CotangentSums {
        let (mut sum, mut sum_hat) = ([0.0; LANES], [0.0; LANES]);
        let ((x, x_rest), (gain, gain_rest), (d_y, d_rest)) =
            (x.as_chunks::<LANES>(), gain.as_chunks::<LANES>(), d_y.as_chunks::<LANES>());
        for ((x, gain), d_y) in x.iter().zip(gain).zip(d_y) {
            for i in 0..LANES {
                let d_hat = d_y[i] * gain[i];
                sum[i] += d_hat;
                sum_hat[i] = M::mul_add(d_hat, (x[i] - moments.mean) * moments.inverse, sum_hat[i]);
            }
        }
        let (mut sum, mut sum_hat) = (sum_lanes(sum), sum_lanes(sum_hat));
        for ((x, gain), d_y) in x_rest.iter().zip(gain_rest).zip(d_rest) {
            sum += d_y * gain;
            sum_hat += d_y * gain * ((x - moments.mean) * moments.inverse);
        }
        CotangentSums { d_hat: sum, product: sum_hat }
    }

    /// Writes the gradient of x. `means` are the means of `d_hat` and of `d_hat * hat` (see [`CotangentSums`]).
    fn normalise_backward<M>(
        x: &[f32], moments: RowMoments, gain: &[f32], d_y: &[f32], means: [f32; 2], d_x: &mut [f32],
    ) {
        let [mean_d_hat, mean_product] = means;
        for (((d_x, &x), &gain), &d_y) in d_x.iter_mut().zip(x).zip(gain).zip(d_y) {
            let hat = (x - moments.mean) * moments.inverse;
            let centred = M::mul_add(d_y, gain, -mean_d_hat);
            *d_x = M::mul_add(-hat, mean_product, centred) * moments.inverse;
        }
    }

    fn add_gain_gradient<M>(x: &[f32], moments: RowMoments, d_y: &[f32], sum: &mut [f32]) {
        for ((sum, &x), &d_y) in sum.iter_mut().zip(x).zip(d_y) {
            *sum = M::mul_add((x - moments.mean) * moments.inverse, d_y, *sum);
        }
    }

    fn add<M>(x: &[f32], sum: &mut [f32]) {
        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
    }

    fn add_product<M>(x: &[f32], y: &[f32], sum: &mut [f32]) {
        for ((sum, &x), &y) in sum.iter_mut().zip(x).zip(y) {
            *sum = M::mul_add(x, y, *sum);
        }
    }

    fn product<M>(x: &[f32], y: &[f32], z: &mut [f32]) {
        for ((z, &x), &y) in z.iter_mut().zip(x).zip(y) {
            *z = x * y;
        }
    }
}
