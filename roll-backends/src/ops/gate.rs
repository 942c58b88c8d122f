//! The gated residual of a transformer block: the block's output y, times a gate, is added to the residual stream x.

use burn_tensor::{DType, Tensor};

use super::Kernels;
use super::by_group::ByGroup;
use super::expression::{Expression, sum_if_shared};
use super::norm::{assert_group_operand, assert_row_operand};
use super::operator::{Cotangents, Operator, Pullback, call};
use crate::backend::{Backend, TensorMetadata, tensor::FloatTensor as Floats};

/// `x + y * gate`, or `x + y` without a gate; x and y are `[L, D]`, gate is `[1, D]` or `[L, D]`. x, gate and the
/// result are f32; y may be bf16, so that the residual stream stays exact next to operators that return bf16.
pub fn gated_add(x: Tensor<2>, y: Tensor<2>, gate: Option<Tensor<2>>) -> Tensor<2> {
    assert_eq!(x.dims(), y.dims(), "both sides of a gated sum");
    if let Some(gate) = &gate {
        assert_row_operand("the gate of a sum", gate, &x);
    }
    let (x, y) = (x.into_dispatch(), y.into_dispatch());
    match gate {
        Some(gate) => call(GatedAdd, [x, y, gate.into_dispatch()]),
        None => call(GatedAdd, [x, y]),
    }
}

/// [`gated_add`] with one row of the gate, `[G, D]`, for each of G groups of rows, which have the sizes `groups`.
pub fn gated_add_groups(x: Tensor<2>, y: Tensor<2>, gate: Tensor<2>, groups: &[usize]) -> Tensor<2> {
    if groups.len() < 2 {
        return gated_add(x, y, Some(gate));
    }
    assert_eq!(x.dims(), y.dims(), "both sides of a gated sum");
    assert_group_operand("the gate of a sum", &gate, &x, groups);
    let by_group = ByGroup { operator: GatedAdd, groups: groups.to_vec(), grouped: [false, false, true] };
    call(by_group, [x, y, gate].map(Tensor::into_dispatch))
}

/// See [`gated_add`]; the operands are x, y and, if there is one, the gate.
#[derive(Clone)]
struct GatedAdd;

impl Operator<3> for GatedAdd {
    fn record<B: Kernels>(
        self,
        [x, y, gate]: [Floats<B>; 3],
        [x_wanted, y_wanted, gate_wanted]: [bool; 3],
    ) -> (Floats<B>, impl Pullback<B, 3>) {
        let dtype = y.dtype();
        // y is read for the gate's gradient only. With frozen modulation that is not wanted, and y is not saved.
        let saved = gate_wanted.then(|| y.clone());
        let z = B::residual_forward(x, y, Some(gate.clone()));
        (z, move |d_z: Floats<B>| {
            let d_gate = saved.and_then(|y| {
                let y = Expression::<B>(y).cast(DType::F32).0;
                let only_gate = [false, true];
                let [_, d_gate] = B::gated_add_backward(y, gate.clone(), d_z.clone(), only_gate);
                d_gate
            });
            let d_y = y_wanted.then(|| B::residual_backward(Some(gate), d_z.clone(), dtype));
            [x_wanted.then_some(d_z), d_y, d_gate]
        })
    }
}

impl Operator<2> for GatedAdd {
    fn record<B: Kernels>(
        self,
        [x, y]: [Floats<B>; 2],
        [x_wanted, y_wanted]: [bool; 2],
    ) -> (Floats<B>, impl Pullback<B, 2>) {
        let dtype = y.dtype();
        let no_gate = None;
        (B::residual_forward(x, y, no_gate), move |d_z: Floats<B>| {
            let no_gate = None;
            let d_y = y_wanted.then(|| B::residual_backward(no_gate, d_z.clone(), dtype));
            [x_wanted.then_some(d_z), d_y]
        })
    }
}

/// The gated sum and its gradients on one backend.
pub trait GateKernel: Backend {
    /// `x + y * gate`, all in f32.
    fn gated_add_forward(x: Floats<Self>, y: Floats<Self>, gate: Floats<Self>) -> Floats<Self> {
        (Expression::<Self>(x) + Expression(y) * Expression(gate)).0
    }

    /// The gradients of y and gate that are `wanted`, all in f32. The gradient of x is the cotangent itself.
    fn gated_add_backward(
        y: Floats<Self>,
        gate: Floats<Self>,
        d_z: Floats<Self>,
        [y_wanted, gate_wanted]: [bool; 2],
    ) -> Cotangents<Self, 2> {
        let (y, gate, d_z) = (Expression::<Self>(y), Expression(gate), Expression(d_z));
        let is_shared = gate.dims::<2>()[0] == 1;
        let d_y = y_wanted.then(|| (d_z.clone() * gate).0);
        let d_gate = gate_wanted.then(|| sum_if_shared(y * d_z, is_shared).0);
        [d_y, d_gate]
    }

    /// The sum for y in f32 or bf16, with or without a gate.
    fn residual_forward(x: Floats<Self>, y: Floats<Self>, gate: Option<Floats<Self>>) -> Floats<Self> {
        let y = Expression::<Self>(y).cast(DType::F32);
        match gate {
            Some(gate) => Self::gated_add_forward(x, y.0, gate),
            None => (Expression::<Self>(x) + y).0,
        }
    }

    /// The gradient of y, cast to `dtype` (the dtype of y).
    fn residual_backward(gate: Option<Floats<Self>>, d_z: Floats<Self>, dtype: DType) -> Floats<Self> {
        let d_y = match gate {
            // The first argument stands in for y, on which the gradient of y does not depend.
            Some(gate) => {
                let only_y = [true, false];
                let [d_y, _] = Self::gated_add_backward(d_z.clone(), gate, d_z.clone(), only_y);
                d_y.unwrap_or(d_z)
            }
            None => d_z,
        };
        Expression::<Self>(d_y).cast(dtype).0
    }
}
