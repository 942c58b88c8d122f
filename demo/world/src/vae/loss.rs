//! The goal of the VAE: to give frames back, with latents that a diffusion model can learn.

use burn::tensor::{Device, Tensor};

use super::moments::Moments;
use crate::training::upload;

/// Weight of the error of neighbours' differences: edges are where a blurred picture is wrong.
const EDGES: f32 = 0.5;
/// Weight of the latents' mean square.
const SIZE: f32 = 1e-3;
/// Weight of the distance of each channel's mean from 0 and variance from 1.
const MOMENTS: f32 = 1e-2;

/// Error of `decoded` against `frames`, `[3, T, H, W]`: absolute, and squared with the weight `squared`.
pub fn reconstruction(decoded: Tensor<4>, frames: Tensor<4>, squared: f32) -> Tensor<1> {
    let [_, _, h, w] = frames.dims();
    let error = decoded - frames;
    let across = error.clone().narrow(3, 1, w - 1) - error.clone().narrow(3, 0, w - 1);
    let down = error.clone().narrow(2, 1, h - 1) - error.clone().narrow(2, 0, h - 1);
    let edges = across.abs().mean() + down.abs().mean();
    error.clone().abs().mean() + error.square().mean() * squared + edges * EDGES
}

/// Keeps normalised latents `[C, T, H, W]` near a standard normal distribution.
///
/// The moments of one small batch say little about those of all latents. So the penalty `mean^2 + (variance - 1)^2`
/// is that of the running `moments`, and the batch gives its slope.
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
