//! Group norm over the channels and pixels of a picture, optionally followed by SiLU, and its pullback.

use burn_tensor::{DType, Tensor, activation};
use roll_network::precision::as_dtype;

/// Added to the variance (diffusers' `AutoencoderKL`).
const EPS: f64 = 1e-6;

/// The weights of a group norm.
#[derive(Clone)]
pub(super) struct GroupNorm {
    /// Number of groups of channels.
    pub groups: usize,
    /// Gain of each channel, f32 `[C]`.
    pub gain: Tensor<1>,
    /// Bias of each channel, f32 `[C]`.
    pub bias: Tensor<1>,
    /// Whether SiLU follows.
    pub silu: bool,
}

impl GroupNorm {
    /// Normalises x `[C, 1, H, W]`. Computes in f32 and returns the dtype of x.
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let (dims, dtype) = (x.dims(), x.dtype());
        let (normalised, _) = self.normalise(x);
        let z = self.affine(normalised);
        let y = if self.silu { activation::silu(z) } else { z };
        as_dtype(y, dtype).reshape(dims)
    }

    /// The cotangent of x, given the cotangent of [`GroupNorm::apply`]'s result. In the dtype of the cotangent.
    pub fn pull(&self, x: Tensor<4>, cotangent: Tensor<4>) -> Tensor<4> {
        let (dims, dtype) = (x.dims(), cotangent.dtype());
        let [c, _, h, w] = dims;
        let (normalised, inverse_deviation) = self.normalise(x);
        let mut d_z = as_dtype(cotangent, DType::F32).reshape([c, h, w]);
        if self.silu {
            let z = self.affine(normalised.clone());
            let sigmoid = activation::sigmoid(z.clone());
            // d silu(z) / dz = s + z s (1 - s), with s = sigmoid(z)
            d_z = d_z * (sigmoid.clone() + z * sigmoid.clone() * (sigmoid.neg() + 1.0));
        }
        let d_normalised = d_z * self.gain.clone().reshape([c, 1, 1]);
        let mean = self.mean(d_normalised.clone());
        let mean_along = self.mean(d_normalised.clone() * normalised.clone());
        let d_x = (d_normalised - mean - normalised * mean_along) * inverse_deviation;
        as_dtype(d_x, dtype).reshape(dims)
    }

    /// Returns x, f32 `[C, H, W]`, with mean 0 and variance 1 in each group, and the inverse of the deviations,
    /// `[C, 1, 1]`.
    fn normalise(&self, x: Tensor<4>) -> (Tensor<3>, Tensor<3>) {
        let [c, _, h, w] = x.dims();
        let x = as_dtype(x, DType::F32).reshape([c, h, w]);
        let mean = self.mean(x.clone());
        let centred = x - mean;
        let variance = self.mean(centred.clone() * centred.clone());
        let inverse_deviation = (variance + EPS).sqrt().recip();
        (centred * inverse_deviation.clone(), inverse_deviation)
    }

    /// The mean of each group of x `[C, H, W]`, repeated for its channels: `[C, 1, 1]`. It is the mean of the means of
    /// rows, because one f32 sum over millions of pixels would be inexact.
    fn mean(&self, x: Tensor<3>) -> Tensor<3> {
        let [c, h, _] = x.dims();
        let members = c / self.groups;
        let of_rows = x.mean_dim(2).reshape([c, h]).mean_dim(1).reshape([self.groups, members]);
        let of_groups = of_rows.mean_dim(1);
        of_groups.expand([self.groups, members]).reshape([c, 1, 1])
    }

    /// Applies gain and bias to x `[C, H, W]`.
    fn affine(&self, x: Tensor<3>) -> Tensor<3> {
        let [c, ..] = x.dims();
        x * self.gain.clone().reshape([c, 1, 1]) + self.bias.clone().reshape([c, 1, 1])
    }
}
