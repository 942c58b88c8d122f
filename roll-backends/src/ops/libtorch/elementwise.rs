//! Activations, rotary embedding, gates and the AdamW update on libtorch: one or two passes over memory each.

use burn_tensor::DType;
use roll_core::AdamUpdate;
use tch::{Kind, Tensor};

use super::{fresh, fused};
use crate::backend::{LibTorch, libtorch::TchTensor};
use crate::ops::activation::Activation;
use crate::ops::adam::composed;
use crate::ops::{ActivationKernel, AdamKernel, Cotangents, Direction, GateKernel, RopeKernel};

impl ActivationKernel for LibTorch {
    fn activation_forward(activation: Activation, x: TchTensor) -> TchTensor {
        fresh(match activation {
            Activation::Gelu => x.tensor.gelu("none"),
            Activation::GeluTanh => x.tensor.gelu("tanh"),
            Activation::Silu => x.tensor.silu(),
        })
    }

    fn activation_backward(activation: Activation, x: TchTensor, d_y: TchTensor) -> TchTensor {
        fresh(match activation {
            Activation::Gelu => x.tensor.gelu_backward(&d_y.tensor, "none"),
            Activation::GeluTanh => x.tensor.gelu_backward(&d_y.tensor, "tanh"),
            Activation::Silu => x.tensor.silu_backward(&d_y.tensor),
        })
    }
}

impl GateKernel for LibTorch {
    fn gated_add_forward(x: TchTensor, y: TchTensor, gate: TchTensor) -> TchTensor {
        fresh(x.tensor.addcmul(&y.tensor, &gate.tensor))
    }

    fn gated_add_backward(y: TchTensor, gate: TchTensor, d_z: TchTensor, wanted: [bool; 2]) -> Cotangents<Self, 2> {
        let [y_wanted, gate_wanted] = wanted;
        let d_y = y_wanted.then(|| fresh(&d_z.tensor * &gate.tensor));
        let d_gate = gate_wanted.then(|| fresh(sum_if_shared(&y.tensor * &d_z.tensor, &gate.tensor)));
        [d_y, d_gate]
    }

    /// One pass over memory, fused or by ATen, which converts y as it reads it.
    fn residual_forward(x: TchTensor, y: TchTensor, gate: Option<TchTensor>) -> TchTensor {
        let ops = fused::ops_in_bf16(&y.tensor);
        let sum = ops.and_then(|ops| ops.gated_add(&x.tensor, &y.tensor, gate.as_ref().map(|gate| &gate.tensor)));
        fresh(sum.unwrap_or_else(|| match gate {
            Some(gate) => x.tensor.addcmul(&y.tensor, &gate.tensor),
            None => &x.tensor + &y.tensor,
        }))
    }

    /// One pass over memory, fused or by ATen, which rounds the product as it writes it.
    fn residual_backward(gate: Option<TchTensor>, d_z: TchTensor, dtype: DType) -> TchTensor {
        let kind = if dtype == DType::BF16 { Kind::BFloat16 } else { Kind::Float };
        if kind == Kind::BFloat16
            && let Some(gate) = &gate
            && let Some(d_y) = fused::ops(&d_z.tensor).and_then(|ops| ops.gate_pull(&d_z.tensor, Some(&gate.tensor)))
        {
            return fresh(d_y);
        }
        match gate {
            Some(gate) => {
                let d_y = Tensor::empty(d_z.tensor.size(), (kind, d_z.tensor.device()));
                fresh(d_z.tensor.mul_out(&d_y, &gate.tensor))
            }
            None if d_z.tensor.kind() == kind => d_z,
            None => fresh(d_z.tensor.to_kind(kind)),
        }
    }
}

impl RopeKernel for LibTorch {
    fn rotate(x: TchTensor, [cos, sin]: [TchTensor; 2], heads: usize, direction: Direction) -> TchTensor {
        let size = x.tensor.size();
        let (rows, half) = (size[0], size[1] / heads as i64 / 2);
        // A pair is a complex number, and the rotation a factor of magnitude one.
        let pairs = x.tensor.contiguous().view([rows, heads as i64, half, 2]).view_as_complex();
        let sin = match direction {
            Direction::Forward => sin.tensor,
            Direction::Back => -&sin.tensor,
        };
        let rotation = Tensor::complex(&cos.tensor, &sin).unsqueeze(1);
        fresh((pairs * rotation).view_as_real().reshape(size))
    }
}

/// The fused kernel on GPUs, composed operations elsewhere.
impl AdamKernel for LibTorch {
    fn adam_update(operands: [TchTensor; 4], update: &AdamUpdate) -> [TchTensor; 3] {
        let tensors = operands.each_ref().map(|operand| &operand.tensor);
        let new = fused::ops(tensors[0]).and_then(|ops| ops.adam(tensors, update));
        match new {
            Some(new) => new.map(fresh),
            None => composed::<Self>(operands, update),
        }
    }
}

/// Returns the gradient of `operand`, which has either as many rows as a result, or one row that all rows of the result
/// share. `d` is the gradient at each row of the result.
pub(super) fn sum_if_shared(d: Tensor, operand: &Tensor) -> Tensor {
    match operand.size()[0] {
        1 => d.sum_dim_intlist([0i64].as_slice(), true, None::<Kind>),
        _ => d,
    }
}
