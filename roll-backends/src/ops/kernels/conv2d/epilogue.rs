//! The epilogue of a convolution: activations of the sums, and their derivatives.

use crate::ops::kernels::simd::{MulAdd, sigmoid};

/// An activation, applied to each sum `z`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum KernelEpilogue<'a> {
    /// The identity.
    #[default]
    Nothing,
    /// `max(z, 0)`.
    Relu,
    /// PReLU: `z` if positive, else `z` times the channel's slope.
    Slopes(&'a [f32]),
    /// `clamp(z, low, high)`.
    Clip(f32, f32),
    /// `1 / (1 + e^-z)`.
    Sigmoid,
    /// `z * sigmoid(z)`.
    Silu,
    /// `z * clip(z / 6 + 1/2, 0, 1)`.
    HardSwish,
}

impl KernelEpilogue<'_> {
    /// Applies the activation to values of channel `channel`.
    #[inline(always)]
    pub fn apply<M: MulAdd>(self, channel: usize, values: &mut [f32]) {
        match self {
            Self::Nothing => {}
            // Comparisons, not `max`: NaN stays NaN.
            Self::Relu => values.iter_mut().for_each(|z| {
                let z_now = in_register(*z);
                *z = if z_now < 0.0 { 0.0 } else { z_now };
            }),
            Self::Slopes(slopes) => {
                let slope = slopes[channel];
                values.iter_mut().for_each(|z| {
                    let z_now = in_register(*z);
                    *z = if z_now < 0.0 { slope * z_now } else { z_now };
                });
            }
            Self::Clip(low, high) => values.iter_mut().for_each(|z| {
                let above = if *z < low { low } else { *z };
                *z = if above > high { high } else { above };
            }),
            Self::Sigmoid => values.iter_mut().for_each(|z| *z = sigmoid::<M>(*z)),
            Self::Silu => values.iter_mut().for_each(|z| *z *= sigmoid::<M>(*z)),
            Self::HardSwish => values.iter_mut().for_each(|z| *z *= gate(*z)),
        }
    }

    /// Writes the cotangents of the sums of channel `channel` to `d_z`, given the cotangents of the outputs and
    /// `saved`: the sums if [`KernelEpilogue::needs_sums`] is true, else the outputs.
    #[inline(always)]
    pub fn pull<M: MulAdd>(self, channel: usize, saved: &[f32], d_y: &[f32], d_z: &mut [f32]) {
        let all = saved.iter().zip(d_y).zip(d_z);
        match self {
            Self::Nothing => all.for_each(|((_, d_y), d_z)| *d_z = *d_y),
            Self::Relu => all.for_each(|((y, d_y), d_z)| *d_z = if *y > 0.0 { *d_y } else { 0.0 }),
            Self::Slopes(slopes) => {
                let slope = slopes[channel];
                all.for_each(|((z, d_y), d_z)| *d_z = if *z > 0.0 { *d_y } else { slope * *d_y });
            }
            Self::Clip(low, high) => {
                all.for_each(|((y, d_y), d_z)| *d_z = if *y <= low || *y >= high { 0.0 } else { *d_y });
            }
            Self::Sigmoid => all.for_each(|((y, d_y), d_z)| *d_z = *d_y * *y * (1.0 - *y)),
            Self::Silu => all.for_each(|((z, d_y), d_z)| {
                let s = sigmoid::<M>(*z);
                *d_z = *d_y * s * (1.0 + *z * (1.0 - s));
            }),
            Self::HardSwish => all.for_each(|((z, d_y), d_z)| {
                let slope = if *z > -3.0 && *z < 3.0 { *z / 6.0 } else { 0.0 };
                *d_z = *d_y * (gate(*z) + slope);
            }),
        }
    }

    /// Whether the derivative needs the sums, because it cannot be computed from the outputs.
    pub fn needs_sums(self) -> bool {
        match self {
            Self::Nothing | Self::Relu | Self::Clip(..) | Self::Sigmoid => false,
            // If no slope is negative, an output is positive exactly if its sum is.
            Self::Slopes(slopes) => !slopes.iter().all(|s| *s >= 0.0),
            Self::Silu | Self::HardSwish => true,
        }
    }
}

/// Returns z as the result of an addition. If a value could stay in memory as it was read, the compiler would store
/// only the changed ones with a masked store, which on some processors takes several times as long as everything else.
#[inline(always)]
fn in_register(z: f32) -> f32 {
    z + 0.0
}

#[inline(always)]
fn gate(z: f32) -> f32 {
    let gate = z / 6.0 + 0.5;
    let above = if gate < 0.0 { 0.0 } else { gate };
    if above > 1.0 { 1.0 } else { above }
}
