//! The function of a convolution's sums before they are written, and its derivative.

use crate::ops::kernels::simd::{MulAdd, sigmoid};

/// A function of each output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Then<'a> {
    /// None.
    Nothing,
    /// `max(z, 0)`.
    Relu,
    /// z, and below zero its product with the channel's slope.
    Slopes(&'a [f32]),
    /// z, at least the first and at most the second.
    Clip(f32, f32),
    /// `1 / (1 + e^-z)`.
    Sigmoid,
    /// `z * sigmoid(z)`.
    Silu,
    /// `z * clip(z / 6 + 1/2, 0, 1)`.
    HardSwish,
}

impl Then<'_> {
    /// Applies it to a stretch of channel `channel`.
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

    /// The cotangents of the sums of channel `channel`, given those of the outputs and `kept`: the sums where
    /// [`Then::needs_sums`], else the outputs.
    #[inline(always)]
    pub fn pull<M: MulAdd>(self, channel: usize, kept: &[f32], d_y: &[f32], d_z: &mut [f32]) {
        let all = kept.iter().zip(d_y).zip(d_z);
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

    /// Whether the derivative is computed from the sums, as the outputs do not tell it.
    pub fn needs_sums(self) -> bool {
        match self {
            Self::Nothing | Self::Relu | Self::Clip(..) | Self::Sigmoid => false,
            // An output above zero comes from a sum above zero, and from no other, where no slope is below zero.
            Self::Slopes(slopes) => !slopes.iter().all(|s| *s >= 0.0),
            Self::Silu | Self::HardSwish => true,
        }
    }
}

/// The same number, as the result of a computation. Where a number may be kept as it was read, the compiler writes only the
/// others, by a masked store, which takes several times as long as all the rest on some processors.
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
