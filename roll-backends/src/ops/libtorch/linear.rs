//! Linear layers: products with their sums in place.

use burn::backend::{LibTorch, tensor::FloatTensor};
use tch::{Kind, Tensor};

use super::fresh;
use crate::ops::{Cotangents, LinearKernel, Lora, SavedLinear};

impl LinearKernel for LibTorch {
    fn linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        lora: Option<Lora<FloatTensor<Self>>>,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        let kind = weight.tensor.kind();
        let y = x.tensor.linear(&weight.tensor, Some(bias.tensor.to_kind(kind)));
        // In f32 from here: bf16 would round the low-rank part away where it is below a 256th of the rest, as it is when
        // training begins. Its second product is over the rank alone, and cheap.
        let mut y = y.to_kind(Kind::Float);
        let inner = lora.map(|Lora { down, up, scale }| {
            let inner = x.tensor.matmul(&down.tensor.to_kind(kind).tr());
            let _ = y.addmm_(&(inner.to_kind(Kind::Float) * f64::from(scale)), &up.tensor.tr());
            fresh(inner)
        });
        (fresh(y), inner)
    }

    fn linear_backward(
        saved: SavedLinear<FloatTensor<Self>>,
        d_y: FloatTensor<Self>,
        wanted: [bool; 5],
    ) -> Cotangents<Self, 5> {
        let (x, weight) = (&saved.x.tensor, &saved.weight.tensor);
        let kind = weight.kind();
        let d_bias = wanted[2].then(|| d_y.tensor.sum_dim_intlist([0i64].as_slice(), false, None::<Kind>));
        let d_y = d_y.tensor.to_kind(kind);
        let mut d_x = wanted[0].then(|| d_y.matmul(weight));
        let d_weight = wanted[1].then(|| d_y.tr().matmul(x));
        let [mut d_down, mut d_up] = [None, None];
        if let Some((Lora { down, up, scale }, inner)) = saved.lora {
            let float = |d: Tensor| d.to_kind(Kind::Float);
            let scaled = (wanted[0] || wanted[3]).then(|| d_y.matmul(&up.tensor.to_kind(kind)) * f64::from(scale));
            if let (Some(d_x), Some(d_inner)) = (&mut d_x, &scaled) {
                let _ = d_x.addmm_(d_inner, &down.tensor.to_kind(kind));
            }
            d_down = scaled.filter(|_| wanted[3]).map(|d_inner| float(d_inner.tr().matmul(x)));
            d_up = wanted[4].then(|| float(d_y.tr().matmul(&inner.tensor)) * f64::from(scale));
        }
        [d_x, d_weight, d_bias, d_down, d_up].map(|d| d.map(fresh))
    }
}
