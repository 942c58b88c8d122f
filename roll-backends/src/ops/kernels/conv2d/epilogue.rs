//! The epilogue of a convolution: activations of the sums, and their derivatives.

use crate::ops::Epilogue;
use crate::ops::kernels::simd::{MulAdd, sigmoid};

/// An epilogue, and the slopes of the output channels, which only [`Epilogue::Slopes`] reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelEpilogue<'a> {
    pub kind: Epilogue,
    pub slopes: &'a [f32],
}

impl KernelEpilogue<'_> {
    /// Replaces the sums of channel `channel` by their activations.
    #[inline(always)]
    pub fn apply<M: MulAdd>(self, channel: usize, values: &mut [f32]) {
        match self.kind {
            Epilogue::Nothing => {}
            // Comparisons, not `max`: NaN stays NaN.
            Epilogue::Relu => values.iter_mut().for_each(|z| {
                let z_now = in_register(*z);
                *z = if z_now < 0.0 { 0.0 } else { z_now };
            }),
            Epilogue::Slopes => {
                let slope = self.slopes[channel];
                values.iter_mut().for_each(|z| {
                    let z_now = in_register(*z);
                    *z = if z_now < 0.0 { slope * z_now } else { z_now };
                });
            }
            Epilogue::Clip(low, high) => values.iter_mut().for_each(|z| {
                let at_least_low = if *z < low { low } else { *z };
                *z = if at_least_low > high { high } else { at_least_low };
            }),
            Epilogue::Sigmoid => values.iter_mut().for_each(|z| *z = sigmoid::<M>(*z)),
            Epilogue::Silu => values.iter_mut().for_each(|z| *z *= sigmoid::<M>(*z)),
            Epilogue::HardSwish => values.iter_mut().for_each(|z| *z *= hard_sigmoid(*z)),
        }
    }

    /// Writes the cotangents of the sums of channel `channel` to `d_z`, given the cotangents of the outputs and
    /// `saved`: the sums if [`KernelEpilogue::needs_sums`] is true, else the outputs.
    #[inline(always)]
    pub fn pull<M: MulAdd>(self, channel: usize, saved: &[f32], d_y: &[f32], d_z: &mut [f32]) {
        let elements = saved.iter().zip(d_y).zip(d_z);
        // A saved number is called y if it is an output, and z if it is a sum. For `Slopes` it is an output only if
        // outputs have the signs of the sums (see `needs_sums`).
        match self.kind {
            Epilogue::Nothing => elements.for_each(|((_, d_y), d_z)| *d_z = *d_y),
            Epilogue::Relu => elements.for_each(|((y, d_y), d_z)| *d_z = if *y > 0.0 { *d_y } else { 0.0 }),
            Epilogue::Slopes => {
                let slope = self.slopes[channel];
                elements.for_each(|((z, d_y), d_z)| *d_z = if *z > 0.0 { *d_y } else { slope * *d_y });
            }
            Epilogue::Clip(low, high) => {
                elements.for_each(|((y, d_y), d_z)| *d_z = if *y <= low || *y >= high { 0.0 } else { *d_y });
            }
            Epilogue::Sigmoid => elements.for_each(|((y, d_y), d_z)| *d_z = *d_y * *y * (1.0 - *y)),
            Epilogue::Silu => elements.for_each(|((z, d_y), d_z)| {
                let s = sigmoid::<M>(*z);
                *d_z = *d_y * s * (1.0 + *z * (1.0 - s));
            }),
            Epilogue::HardSwish => elements.for_each(|((z, d_y), d_z)| {
                // `z` times the derivative of `hard_sigmoid`.
                let slope = if *z > -3.0 && *z < 3.0 { *z / 6.0 } else { 0.0 };
                *d_z = *d_y * (hard_sigmoid(*z) + slope);
            }),
        }
    }

    /// Whether the derivative needs the sums, because it cannot be computed from the outputs.
    pub fn needs_sums(self) -> bool {
        match self.kind {
            Epilogue::Nothing | Epilogue::Relu | Epilogue::Clip(..) | Epilogue::Sigmoid => false,
            // The derivative depends on the sign of the sum. If no slope is negative, the output is positive exactly if
            // the sum is.
            Epilogue::Slopes => !self.slopes.iter().all(|s| *s >= 0.0),
            Epilogue::Silu | Epilogue::HardSwish => true,
        }
    }
}

/// Returns z as the result of an addition. If a value could stay in memory as it was read, the compiler would store
/// only the changed ones with a masked store, which on some processors takes several times as long as everything else.
#[inline(always)]
fn in_register(z: f32) -> f32 {
    z + 0.0
}

/// `clamp(z / 6 + 1/2, 0, 1)`; NaN stays NaN.
#[inline(always)]
fn hard_sigmoid(z: f32) -> f32 {
    let line = z / 6.0 + 0.5;
    let not_negative = if line < 0.0 { 0.0 } else { line };
    if not_negative > 1.0 { 1.0 } else { not_negative }
}
