//! The RMS norm of the Wan VAE: one unit per position. Neighbouring units have neighbouring positions, so that reads of
//! each channel are coalesced.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{elementwise_launch, empty, empty_like, values};
use crate::backend::{Cube, TensorMetadata};
use crate::ops::channel_norm::{MIN_NORM, composed_backward};
use crate::ops::{ChannelNormKernel, Cotangents};

impl ChannelNormKernel for Cube {
    fn channel_norm_forward(x: CubeTensor, gain: CubeTensor, has_silu: bool) -> (CubeTensor, CubeTensor) {
        let (x, gain) = (values(x), values(gain));
        let [channels, t, h, w] = x.shape().dims::<4>();
        let positions = t * h * w;
        let (y, factors) = (empty_like(&x), empty(&x, [1, positions]));
        if channels * positions > 0 {
            let (cubes, dim) = elementwise_launch(&x, positions);
            let (client, address) = (x.client.clone(), x.required_address_type());
            let (x, gain) = (x.into_buffer_arg(), gain.into_buffer_arg());
            let (out, out_factors) = (y.clone().into_buffer_arg(), factors.clone().into_buffer_arg());
            let min_norm = MIN_NORM as f32;
            forward::launch(
                &client,
                cubes,
                dim,
                address,
                x,
                gain,
                out,
                out_factors,
                channels,
                positions,
                min_norm,
                has_silu,
            );
        }
        (y, factors)
    }

    fn channel_norm_backward(
        [x, gain, factors]: [CubeTensor; 3],
        has_silu: bool,
        d_y: CubeTensor,
        [x_wanted, gain_wanted]: [bool; 2],
    ) -> Cotangents<Self, 2> {
        let (x, gain, d_y) = (values(x), values(gain), values(d_y));
        let d_gain = if gain_wanted {
            let (saved, only_gain) = ([x.clone(), gain.clone(), factors.clone()], [false, true]);
            let [_, d_gain] = composed_backward::<Self>(saved, has_silu, d_y.clone(), only_gain);
            d_gain
        } else {
            None
        };
        let d_x = x_wanted.then(|| {
            let d_x = empty_like(&x);
            let [channels, t, h, w] = x.shape().dims::<4>();
            let positions = t * h * w;
            if channels * positions > 0 {
                let (cubes, dim) = elementwise_launch(&x, positions);
                let (client, address) = (x.client.clone(), x.required_address_type());
                let (x, gain, factors) = (x.into_buffer_arg(), gain.into_buffer_arg(), factors.into_buffer_arg());
                let (d_y, out) = (d_y.into_buffer_arg(), d_x.clone().into_buffer_arg());
                backward::launch(
                    &client, cubes, dim, address, x, gain, factors, d_y, out, channels, positions, has_silu,
                );
            }
            d_x
        });
        [d_x, d_gain]
    }
}

#[cube(launch, address_type = "dynamic")]
fn forward(
    x: &[f32],
    gain: &[f32],
    y: &mut [f32],
    factors: &mut [f32],
    channels: usize,
    positions: usize,
    min_norm: f32,
    #[comptime] has_silu: bool,
) {
    let position = ABSOLUTE_POS;
    if position >= positions {
        terminate!();
    }
    let mut sum = 0.0f32;
    for channel in 0..channels {
        let value = x[channel * positions + position];
        sum += value * value;
    }
    let factor = f32::cast_from(channels).sqrt() / max(sum.sqrt(), min_norm);
    factors[position] = factor;
    for channel in 0..channels {
        let i = channel * positions + position;
        let value = x[i] * factor * gain[channel];
        y[i] = if comptime!(has_silu) { value / (1.0 + (-value).exp()) } else { value };
    }
}

/// The cotangent of the normalised value `x[i] * factor`.
#[cube]
fn d_normed(x: &[f32], gain: f32, factor: f32, d_y: &[f32], i: usize, #[comptime] has_silu: bool) -> f32 {
    let mut d_value = d_y[i];
    if comptime!(has_silu) {
        let value = x[i] * factor * gain;
        let s = 1.0 / (1.0 + (-value).exp());
        d_value *= s + value * s * (1.0 - s);
    }
    d_value * gain
}

/// `d_x = (d - n * along) * factor`, where n is the normalised value of a channel, d its cotangent, and `along` the
/// mean over channels of `n d`. Below the lower bound of the norm, the divisor does not depend on x, and the
/// gradient has no term with `along`. This needs no case of its own: in practice x is exactly zero there, and so is
/// `along`.
#[cube(launch, address_type = "dynamic")]
fn backward(
    x: &[f32],
    gain: &[f32],
    factors: &[f32],
    d_y: &[f32],
    d_x: &mut [f32],
    channels: usize,
    positions: usize,
    #[comptime] has_silu: bool,
) {
    let position = ABSOLUTE_POS;
    if position >= positions {
        terminate!();
    }
    let factor = factors[position];
    let mut along = 0.0f32;
    for channel in 0..channels {
        let i = channel * positions + position;
        along += x[i] * factor * d_normed(x, gain[channel], factor, d_y, i, has_silu);
    }
    let along = along / f32::cast_from(channels);
    for channel in 0..channels {
        let i = channel * positions + position;
        d_x[i] = (d_normed(x, gain[channel], factor, d_y, i, has_silu) - x[i] * factor * along) * factor;
    }
}
