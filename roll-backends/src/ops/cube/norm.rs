//! Layer norm and RMS norm over the rows of a matrix: one cube of units per row. After the first pass, the row is read
//! from the cache.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::reduction::sum_over_units;
use super::{cube_per_row, empty, empty_like, values};
use crate::backend::{Cube, TensorMetadata};
use crate::ops::norm::composed_backward;
use crate::ops::{Cotangents, NormKernel, SavedNorm};

/// Units per row: a power of two, because sums are reduced as a tree.
const UNITS: u32 = 128;

impl NormKernel for Cube {
    fn norm_forward(x: CubeTensor, gain: CubeTensor, shift: Option<CubeTensor>, eps: f64) -> (CubeTensor, CubeTensor) {
        let is_layer_norm = shift.is_some();
        let (x, gain) = (values(x), values(gain));
        // A kernel launch needs all operands; an RMS norm does not read this one.
        let shift = shift.map_or_else(|| empty(&x, [1]), values);
        let [rows, width] = x.shape().dims::<2>();
        let (y, moments) = (empty_like(&x), empty(&x, [rows, if is_layer_norm { 2 } else { 1 }]));
        if rows * width > 0 {
            let (cubes, dim) = cube_per_row(&x, rows, UNITS);
            let (client, address) = (x.client.clone(), x.required_address_type());
            let (gains, shifts) = (gain.shape().num_elements(), shift.shape().num_elements());
            forward::launch(
                &client,
                cubes,
                dim,
                address,
                x.into_buffer_arg(),
                gain.into_buffer_arg(),
                shift.into_buffer_arg(),
                y.clone().into_buffer_arg(),
                moments.clone().into_buffer_arg(),
                rows,
                width,
                gains,
                shifts,
                eps as f32,
                is_layer_norm,
                UNITS,
            );
        }
        (y, moments)
    }

    fn norm_backward(saved: SavedNorm<CubeTensor>, d_y: CubeTensor, wanted: [bool; 3]) -> Cotangents<Self, 3> {
        let [x_wanted, gain_wanted, shift_wanted] = wanted;
        let d_x = x_wanted.then(|| backward_x(&saved, d_y.clone()));
        // Composed operations: these sums over rows are rarely wanted, because gains and shifts are frozen or computed
        // from a single timestep.
        let [_, d_gain, d_shift] = composed_backward::<Self>(saved, d_y, [false, gain_wanted, shift_wanted]);
        [d_x, d_gain, d_shift]
    }
}

fn backward_x(saved: &SavedNorm<CubeTensor>, d_y: CubeTensor) -> CubeTensor {
    let (x, gain, d_y) = (values(saved.x.clone()), values(saved.gain.clone()), values(d_y));
    let moments = saved.moments.clone();
    let d_x = empty_like(&x);
    let is_layer_norm = saved.shift.is_some();
    let [rows, width] = x.shape().dims::<2>();
    if rows * width > 0 {
        let (cubes, dim) = cube_per_row(&x, rows, UNITS);
        let (client, address) = (x.client.clone(), x.required_address_type());
        let gains = gain.shape().num_elements();
        backward::launch(
            &client,
            cubes,
            dim,
            address,
            x.into_buffer_arg(),
            gain.into_buffer_arg(),
            moments.into_buffer_arg(),
            d_y.into_buffer_arg(),
            d_x.clone().into_buffer_arg(),
            rows,
            width,
            gains,
            is_layer_norm,
            UNITS,
        );
    }
    d_x
}

/// One row per cube. `gains` and `shifts` are the numbers of elements of gain and shift, which have one row or the same
/// number of rows as x.
#[cube(launch, address_type = "dynamic")]
fn forward(
    x: &[f32],
    gain: &[f32],
    shift: &[f32],
    y: &mut [f32],
    moments: &mut [f32],
    rows: usize,
    width: usize,
    gains: usize,
    shifts: usize,
    eps: f32,
    #[comptime] is_layer_norm: bool,
    #[comptime] units: u32,
) {
    if CUBE_POS >= rows {
        terminate!();
    }
    let start = CUBE_POS * width;
    let step = units as usize;
    let mut partial_sums = Shared::<[f32]>::new_slice(units as usize);
    let count = f32::cast_from(width);
    // 0 if all rows share one row of the gain, else `start`.
    let gain_start = start % gains;

    let mut mean = 0.0f32;
    if comptime!(is_layer_norm) {
        let mut sum = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < width {
            sum += x[start + i];
            i += step;
        }
        mean = sum_over_units(&mut partial_sums, sum) / count;
    }
    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let centred = x[start + i] - mean;
        sum += centred * centred;
        i += step;
    }
    let inverse = 1.0 / (sum_over_units(&mut partial_sums, sum) / count + eps).sqrt();

    let mut i = UNIT_POS as usize;
    while i < width {
        let mut value = (x[start + i] - mean) * inverse * gain[gain_start + i];
        if comptime!(is_layer_norm) {
            let shift_start = start % shifts;
            value += shift[shift_start + i];
        }
        y[start + i] = value;
        i += step;
    }
    if UNIT_POS == 0 {
        if comptime!(is_layer_norm) {
            moments[2 * CUBE_POS] = mean;
            moments[2 * CUBE_POS + 1] = inverse;
        } else {
            moments[CUBE_POS] = inverse;
        }
    }
}

/// `d_x = (d - mean_d - n * mean_nd) * inverse`, where n is the normalised row, d its cotangent, `mean_d` the mean of
/// d, and `mean_nd` the mean of `n d`. `inverse` is the factor by which the forward pass normalised the row, the last
/// of the row's moments. An RMS norm omits `mean_d`.
#[cube(launch, address_type = "dynamic")]
fn backward(
    x: &[f32],
    gain: &[f32],
    moments: &[f32],
    d_y: &[f32],
    d_x: &mut [f32],
    rows: usize,
    width: usize,
    gains: usize,
    #[comptime] is_layer_norm: bool,
    #[comptime] units: u32,
) {
    if CUBE_POS >= rows {
        terminate!();
    }
    let start = CUBE_POS * width;
    let step = units as usize;
    let mut partial_sums = Shared::<[f32]>::new_slice(units as usize);
    let count = f32::cast_from(width);
    let gain_start = start % gains;
    let mut mean = 0.0f32;
    if comptime!(is_layer_norm) {
        mean = moments[2 * CUBE_POS];
    }
    let inverse = if comptime!(is_layer_norm) { moments[2 * CUBE_POS + 1] } else { moments[CUBE_POS] };

    let mut sum_nd = 0.0f32;
    let mut sum_d = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let d = d_y[start + i] * gain[gain_start + i];
        sum_nd += d * (x[start + i] - mean) * inverse;
        sum_d += d;
        i += step;
    }
    let mean_nd = sum_over_units(&mut partial_sums, sum_nd) / count;
    let mut mean_d = 0.0f32;
    if comptime!(is_layer_norm) {
        mean_d = sum_over_units(&mut partial_sums, sum_d) / count;
    }

    let mut i = UNIT_POS as usize;
    while i < width {
        let d = d_y[start + i] * gain[gain_start + i];
        d_x[start + i] = (d - mean_d - (x[start + i] - mean) * inverse * mean_nd) * inverse;
        i += step;
    }
}
