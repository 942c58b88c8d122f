//! Group norm over the channels and pixels of a picture, alone or followed by SiLU.

use burn_tensor::{DType, Tensor};
use roll_backends::ops::{self, Groups};
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
}

impl GroupNorm {
    /// SiLU of the normalised x `[C, 1, H, W]`. Computes in f32 and returns the dtype of x. Not differentiable.
    pub fn apply_silu(self, x: Tensor<4>) -> Tensor<4> {
        let groups = self.sizes();
        ops::group_norm_silu(x, self.gain, self.bias, groups)
    }

    /// The cotangent of x, given the cotangent of [`GroupNorm::apply_silu`]'s result. In the dtype of the cotangent.
    pub fn pull_silu(self, x: Tensor<4>, cotangent: Tensor<4>) -> Tensor<4> {
        let groups = self.sizes();
        ops::group_norm_silu_pull(x, self.gain, self.bias, groups, cotangent)
    }

    /// Normalises x `[C, 1, H, W]`. Computes in f32 and returns the dtype of x. Differentiable.
    pub fn apply(self, x: Tensor<4>) -> Tensor<4> {
        let (dims, dtype) = (x.dims(), x.dtype());
        let [c, _, h, w] = dims;
        let x = as_dtype(x, DType::F32).reshape([c, h, w]);
        let mean = self.mean(x.clone());
        let centred = x - mean;
        let variance = self.mean(centred.clone() * centred.clone());
        let normalised = centred * (variance + EPS).sqrt().recip();
        let y = normalised * self.gain.reshape([c, 1, 1]) + self.bias.reshape([c, 1, 1]);
        as_dtype(y, dtype).reshape(dims)
    }

    fn sizes(&self) -> Groups {
        Groups { groups: self.groups, eps: EPS }
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
}
