//! The residual with a gate.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::expression::{Expression, summed_rows};
use super::norm::assert_row_operand;
use super::record::{Cotangents, record};

/// `x + y * gate`; gate is `[1, D]` or `[L, D]`.
pub fn gated_add(x: Tensor<2>, y: Tensor<2>, gate: Tensor<2>) -> Tensor<2> {
    assert_eq!(x.dims(), y.dims(), "both sides of a gated sum");
    assert_row_operand("the gate of a sum", &gate, &x);
    let (x, y, gate) = (x.into_dispatch(), y.into_dispatch(), gate.into_dispatch());
    Tensor::from_dispatch(<Dispatch as GateOps>::gated_add(x, y, gate))
}

/// The gated sum as the run-time dispatch calls it. A backend implements [`GateKernel`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    LibTorch: cfg(feature = "libtorch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait GateOps: Backend {
    /// See [`gated_add`].
    fn gated_add(x: FloatTensor<Self>, y: FloatTensor<Self>, gate: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The gated sum and its gradients on one backend.
pub trait GateKernel: Backend {
    /// The sum.
    fn gated_add_forward(x: FloatTensor<Self>, y: FloatTensor<Self>, gate: FloatTensor<Self>) -> FloatTensor<Self> {
        (Expression::<Self>(x) + Expression(y) * Expression(gate)).0
    }

    /// The wanted ones of the gradients of y and gate; that of x is the cotangent itself.
    fn gated_add_backward(
        y: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        d_z: FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> Cotangents<Self, 2> {
        let (y, gate, d_z) = (Expression::<Self>(y), Expression(gate), Expression(d_z));
        let shared = gate.dims::<2>()[0] == 1;
        let d_y = wanted[0].then(|| (d_z.clone() * gate).0);
        let d_gate = wanted[1].then(|| summed_rows(y * d_z, shared).0);
        [d_y, d_gate]
    }
}

impl<B: GateKernel> GateOps for B {
    fn gated_add(x: FloatTensor<Self>, y: FloatTensor<Self>, gate: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::gated_add_forward(x, y, gate)
    }
}

impl<B: GateKernel, C: CheckpointStrategy> GateOps for Autodiff<B, C> {
    fn gated_add(x: FloatTensor<Self>, y: FloatTensor<Self>, gate: FloatTensor<Self>) -> FloatTensor<Self> {
        record::<B, C, _, 3>([x, y, gate], |[x, y, gate]| {
            let z = B::gated_add_forward(x, y.clone(), gate.clone());
            (z, move |d_z: FloatTensor<B>, [x_wanted, y_wanted, gate_wanted]: [bool; 3]| {
                let [d_y, d_gate] = B::gated_add_backward(y, gate, d_z.clone(), [y_wanted, gate_wanted]);
                [x_wanted.then_some(d_z), d_y, d_gate]
            })
        })
    }
}
