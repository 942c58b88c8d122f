//! Operators with a fused forward and their own backward.
//!
//! One file per family: the public function, the trait through which Burn's dispatch reaches it, the trait of kernels
//! that a backend implements, and the backward pass. Another backend joins by implementing those two traits.

mod attention;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "flex")]
pub(crate) mod kernels;

use burn::backend::autodiff::{grads::Gradients, ops::Ops};
use burn::backend::{Backend, tensor::FloatTensor};
use burn::tensor::{Tensor, activation};

pub use attention::{AttentionCall, AttentionKernel, AttentionOps, AttentionOptions, attention, attention_with};

/// The backward of an operator: `gradients_of` gets what the forward saved, the cotangent of the result and which
/// parents are tracked, and returns the gradients of those.
fn pull<B: Backend, S, const N: usize>(
    ops: Ops<S, N>,
    gradients: &mut Gradients,
    gradients_of: impl FnOnce(S, FloatTensor<B>, [bool; N]) -> [Option<FloatTensor<B>>; N],
) where
    S: Clone + Send + std::fmt::Debug + 'static,
{
    let cotangent = gradients.consume::<B>(&ops.node);
    let wanted = ops.parents.each_ref().map(Option::is_some);
    let found = gradients_of(ops.state, cotangent, wanted);
    for (parent, gradient) in ops.parents.into_iter().zip(found) {
        if let (Some(parent), Some(gradient)) = (parent, gradient) {
            gradients.register::<B>(parent.id, gradient);
        }
    }
}

/// `(x - mean) / sqrt(var + eps) * gain + shift` over the last axis of `[L, D]`; gain and shift are `[1, D]` or
/// `[L, D]`.
pub fn layer_norm(x: Tensor<2>, gain: Tensor<2>, shift: Tensor<2>, eps: f64) -> Tensor<2> {
    let centred = x.clone() - x.mean_dim(1);
    let variance = centred.clone().square().mean_dim(1);
    centred * (variance + eps).sqrt().recip() * gain + shift
}

/// `x / sqrt(mean(x^2) + eps) * gain` over the last axis of `[L, D]`.
pub fn rms_norm(x: Tensor<2>, gain: Tensor<1>, eps: f64) -> Tensor<2> {
    let scale = (x.clone().square().mean_dim(1) + eps).sqrt().recip();
    x * scale * gain.unsqueeze()
}

/// Rotates neighbouring pairs of each head of `x` `[L, heads * d]` by the angles whose cosine and sine are given,
/// `[L, d / 2]`.
pub fn rope(x: Tensor<2>, cos: Tensor<2>, sin: Tensor<2>, heads: usize) -> Tensor<2> {
    let [l, c] = x.dims();
    let half = c / heads / 2;
    let pairs = x.reshape([l, heads, half, 2]);
    let even: Tensor<3> = pairs.clone().narrow(3, 0, 1).squeeze_dim(3);
    let odd: Tensor<3> = pairs.narrow(3, 1, 1).squeeze_dim(3);
    let (cos, sin) = (cos.reshape([l, 1, half]), sin.reshape([l, 1, half]));
    let first = even.clone() * cos.clone() - odd.clone() * sin.clone();
    let second = even * sin + odd * cos;
    Tensor::stack::<4>(vec![first, second], 3).reshape([l, c])
}

/// GELU in its tanh form.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    activation::gelu_approximate(x)
}

/// `x * sigmoid(x)`.
pub fn silu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    activation::silu(x)
}

/// `x + y * gate`; gate is `[1, D]` or `[L, D]`.
pub fn gated_add(x: Tensor<2>, y: Tensor<2>, gate: Tensor<2>) -> Tensor<2> {
    x + y * gate
}

/// `x / max(|x|, 1e-12) * sqrt(C) * gain`, the norm taken over the channels of `[C, T, H, W]`: the RMS norm of the
/// Wan VAE.
pub fn channel_norm(x: Tensor<4>, gain: Tensor<1>) -> Tensor<4> {
    let channels = x.dims()[0];
    let norm = x.clone().square().sum_dim(0).sqrt().clamp_min(1e-12);
    x / norm * gain.mul_scalar((channels as f64).sqrt()).reshape([channels, 1, 1, 1])
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests;
