//! The loss of the VAE: reconstruction of frames, and latents that a diffusion model can learn.

use burn_tensor::{Device, Tensor};

use super::moments::Moments;
use crate::training::upload;

/// Weight of the error of differences between neighbouring pixels. Blurred pictures are wrong at edges.
const EDGES: f32 = 0.5;
/// Weight of the latents' mean square.
const SIZE: f32 = 1e-3;
/// Weight of the penalty on each channel's mean (target 0) and variance (target 1).
const MOMENTS: f32 = 1e-2;

/// Returns the error of `decoded` against `frames`, `[3, T, H, W]`: absolute error, squared error with weight
/// `squared`, and edge error.
pub fn reconstruction(decoded: Tensor<4>, frames: Tensor<4>, squared: f32) -> Tensor<1> {
    let [_, _, h, w] = frames.dims();
    let error = decoded - frames;
    let across = error.clone().narrow(3, 1, w - 1) - error.clone().narrow(3, 0, w - 1);
    let down = error.clone().narrow(2, 1, h - 1) - error.clone().narrow(2, 0, h - 1);
    let edges = across.abs().mean() + down.abs().mean();
    error.clone().abs().mean() + error.square().mean() * squared + edges * EDGES
}

/// Returns a penalty that keeps normalized latents `[C, T, H, W]` near a standard normal distribution.
///
/// The moments of one small batch are a poor estimate for all latents. So the penalty `mean^2 + (variance - 1)^2` uses
/// the running `moments`, and only its gradient is computed on the batch.
pub fn latents(latents: Tensor<4>, moments: &Moments, device: &Device) -> Tensor<1> {
    let [c, t, h, w] = latents.dims();
    let per_channel = |values: Vec<f32>| upload(values, [c, 1], device).autodiff();
    let rows = latents.reshape([c, t * h * w]);
    let mean = per_channel(moments.mean.clone());
    let squares = (rows.clone() - mean.clone()).square().mean_dim(1);
    let excess = per_channel(moments.variance.iter().map(|v| v - 1.0).collect());
    let slope = rows.clone().mean_dim(1) * mean + squares * excess;
    rows.square().mean() * SIZE + slope.mean() * (2.0 * MOMENTS)
}
