//! Linear layers on libtorch, with LoRA accumulated in place.

use burn_tensor::DType;
use tch::{Kind, Tensor};

use super::{fresh, wide_product};
use crate::backend::{LibTorch, libtorch::TchTensor};
use crate::ops::{Cotangents, LinearKernel, Lora, SavedLinear};

impl LinearKernel for LibTorch {
    fn linear_forward_as(
        x: TchTensor,
        weight: TchTensor,
        bias: TchTensor,
        lora: Option<Lora<TchTensor>>,
        dtype: DType,
    ) -> (TchTensor, Option<TchTensor>) {
        if dtype == DType::BF16 && weight.tensor.kind() == Kind::BFloat16 {
            return rounded_once(&x.tensor, &weight.tensor, &bias.tensor, lora);
        }
        let (y, inner) = Self::linear_forward(x, weight, bias, lora);
        let y = if dtype == DType::BF16 { fresh(y.tensor.to_kind(Kind::BFloat16)) } else { y };
        (y, inner)
    }

    fn linear_forward(
        x: TchTensor,
        weight: TchTensor,
        bias: TchTensor,
        lora: Option<Lora<TchTensor>>,
    ) -> (TchTensor, Option<TchTensor>) {
        let kind = weight.tensor.kind();
        let y = x.tensor.linear(&weight.tensor, Some(bias.tensor.to_kind(kind)));
        // f32 from here on: bf16 would round LoRA's contribution away where it is below a 256th of the rest, as at the
        // start of training. LoRA's second product is over the rank only, and cheap.
        let mut y = y.to_kind(Kind::Float);
        let inner = lora.map(|Lora { down, up, scale }| {
            let inner = x.tensor.matmul(&down.tensor.to_kind(kind).tr());
            let _ = y.addmm_(&(inner.to_kind(Kind::Float) * f64::from(scale)), &up.tensor.tr());
            fresh(inner)
        });
        (fresh(y), inner)
    }

    fn linear_backward(saved: SavedLinear<TchTensor>, d_y: TchTensor, wanted: [bool; 5]) -> Cotangents<Self, 5> {
        let [x_wanted, weight_wanted, bias_wanted, down_wanted, up_wanted] = wanted;
        let (x, weight) = (&saved.x.tensor, &saved.weight.tensor);
        let kind = weight.kind();
        let d_bias = bias_wanted.then(|| d_y.tensor.sum_dim_intlist([0i64].as_slice(), false, Kind::Float));
        let d_y = d_y.tensor.to_kind(kind);
        let d_weight = weight_wanted.then(|| d_y.tr().matmul(x));
        let Some((Lora { down, up, scale }, inner)) = saved.lora else {
            let d_x = x_wanted.then(|| d_y.matmul(weight));
            return [d_x, d_weight, d_bias, None, None].map(|d| d.map(fresh));
        };
        // The cotangent of `x A^T`, which the gradients of x and A both need.
        let d_inner = (x_wanted || down_wanted).then(|| d_y.matmul(&scaled(&up.tensor, scale).to_kind(kind)));
        let (mut d_x, mut d_down) = (None, None);
        if let Some(d_inner) = d_inner {
            d_x = x_wanted.then(|| {
                // LoRA's part first, as in `rounded_once`: the sum is accumulated before it is rounded.
                let mut d_x = d_inner.matmul(&down.tensor.to_kind(kind));
                let _ = d_x.addmm_(&d_y, weight);
                d_x
            });
            d_down = down_wanted.then(|| in_f32(&d_inner.tr(), x));
        }
        let d_up = up_wanted.then(|| scaled(&in_f32(&d_y.tr(), &inner.tensor), scale));
        [d_x, d_weight, d_bias, d_down, d_up].map(|d| d.map(fresh))
    }
}

/// The layer with a bf16 result, rounded once.
///
/// LoRA's part and the bias are the matrix that the main product is added to: the sum is accumulated in f32 and rounded
/// once. A LoRA contribution far below a step of bf16, as at the start of training, therefore still changes a
/// proportional share of the results, because accumulators are spread between two bf16 numbers. Added to an already
/// rounded result it would change none. Only a contribution below a 512th of its column's bias is lost, because the two
/// are rounded together.
fn rounded_once(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    lora: Option<Lora<TchTensor>>,
) -> (TchTensor, Option<TchTensor>) {
    let kind = weight.kind();
    let bias = bias.to_kind(kind);
    let Some(Lora { down, up, scale }) = lora else { return (fresh(x.linear(weight, Some(bias))), None) };
    let inner = x.matmul(&down.tensor.to_kind(kind).tr());
    let mut y = bias.addmm(&inner, &scaled(&up.tensor, scale).to_kind(kind).tr());
    let _ = y.addmm_(x, &weight.tr());
    (fresh(y), Some(fresh(inner)))
}

/// `x * scale`; without a copy if the scale is 1, which is common.
pub(super) fn scaled(x: &Tensor, scale: f32) -> Tensor {
    if scale == 1.0 { x.shallow_clone() } else { x * f64::from(scale) }
}

/// `a b` with an f32 result. Gradients of parameters are sums over all tokens, and GPUs write their f32 accumulators
/// directly.
pub(super) fn in_f32(a: &Tensor, b: &Tensor) -> Tensor {
    let wide = if a.kind() == Kind::BFloat16 { wide_product(a, b) } else { None };
    wide.unwrap_or_else(|| a.matmul(b).to_kind(Kind::Float))
}
