//! Activations, rotary embedding and gates on flex.

use super::Values;
use crate::backend::{Flex, TensorMetadata, flex::FlexTensor};
use crate::ops::kernels::rope::rotate;
use crate::ops::kernels::rows::RowOperand;
use crate::ops::kernels::{activation, norm};
use crate::ops::{Activation, ActivationKernel, Cotangents, Direction, GateKernel, RopeKernel};

impl ActivationKernel for Flex {
    fn activation_forward(kind: Activation, x: FlexTensor) -> FlexTensor {
        let x = Values::of(x);
        x.like(activation::forward(kind, x.slice()))
    }

    fn activation_backward(kind: Activation, x: FlexTensor, d_y: FlexTensor) -> FlexTensor {
        let (x, d_y) = (Values::of(x), Values::of(d_y));
        x.like(activation::backward(kind, x.slice(), d_y.slice()))
    }
}

impl GateKernel for Flex {
    fn gated_add_forward(x: FlexTensor, y: FlexTensor, gate: FlexTensor) -> FlexTensor {
        let [rows, width] = x.shape().dims::<2>();
        let (x, y, gate) = (Values::of(x), Values::of(y), Values::of(gate));
        x.like(norm::gated_add(x.slice(), y.slice(), rows, RowOperand::new(gate.slice(), rows, width)))
    }

    fn gated_add_backward(y: FlexTensor, gate: FlexTensor, d_z: FlexTensor, wanted: [bool; 2]) -> Cotangents<Self, 2> {
        let [y_wanted, gate_wanted] = wanted;
        let [rows, width] = y.shape().dims::<2>();
        let (y, gate, d_z) = (Values::of(y), Values::of(gate), Values::of(d_z));
        let operand = RowOperand::new(gate.slice(), rows, width);
        let d_y = y_wanted.then(|| y.like(norm::gated_add_backward_y(rows, operand, d_z.slice())));
        let d_gate = gate_wanted.then(|| {
            let d_gate = norm::gated_add_backward_gate(rows, y.slice(), operand.is_shared(), d_z.slice());
            gate.like(d_gate)
        });
        [d_y, d_gate]
    }
}

impl RopeKernel for Flex {
    fn rotate(x: FlexTensor, [cos, sin]: [FlexTensor; 2], heads: usize, direction: Direction) -> FlexTensor {
        let [rows, _] = x.shape().dims::<2>();
        let (x, cos, sin) = (Values::of(x), Values::of(cos), Values::of(sin));
        x.like(rotate(x.slice(), cos.slice(), sin.slice(), rows, heads, direction))
    }
}
