//! The gated residual on flex.

use burn::backend::{Flex, TensorMetadata, flex::FlexTensor};

use super::Values;
use crate::ops::kernels::norm as kernels;
use crate::ops::kernels::rows::RowOperand;
use crate::ops::{Cotangents, GateKernel};

impl GateKernel for Flex {
    fn gated_add_forward(x: FlexTensor, y: FlexTensor, gate: FlexTensor) -> FlexTensor {
        let [rows, width] = x.shape().dims::<2>();
        let (x, y, gate) = (Values::of(x), Values::of(y), Values::of(gate));
        x.like(kernels::gated_add(x.slice(), y.slice(), rows, RowOperand::new(gate.slice(), rows, width)))
    }

    fn gated_add_backward(y: FlexTensor, gate: FlexTensor, d_z: FlexTensor, wanted: [bool; 2]) -> Cotangents<Self, 2> {
        let [rows, width] = y.shape().dims::<2>();
        let (y, gate, d_z) = (Values::of(y), Values::of(gate), Values::of(d_z));
        let operand = RowOperand::new(gate.slice(), rows, width);
        let d_y = wanted[0].then(|| y.like(kernels::gated_add_backward_y(rows, operand, d_z.slice())));
        let d_gate = wanted[1]
            .then(|| gate.like(kernels::gated_add_backward_gate(rows, y.slice(), operand.is_shared(), d_z.slice())));
        [d_y, d_gate]
    }
}
