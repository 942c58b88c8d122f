//! The gated residual.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{elementwise_launch, empty_like, values};
use crate::backend::{Cube, TensorMetadata};
use crate::ops::expression::{Expression, sum_if_shared};
use crate::ops::{Cotangents, GateKernel};

impl GateKernel for Cube {
    fn gated_add_forward(x: CubeTensor, y: CubeTensor, gate: CubeTensor) -> CubeTensor {
        let (x, y, gate) = (values(x), values(y), values(gate));
        let z = empty_like(&x);
        let [rows, channels] = x.shape().dims::<2>();
        let (count, gates) = (rows * channels, gate.shape().num_elements());
        if count > 0 {
            let (cubes, dim) = elementwise_launch(&x, count);
            let (client, address) = (x.client.clone(), x.required_address_type());
            let (x, y, gate, out) =
                (x.into_buffer_arg(), y.into_buffer_arg(), gate.into_buffer_arg(), z.clone().into_buffer_arg());
            forward::launch(&client, cubes, dim, address, x, y, gate, out, count, gates);
        }
        z
    }

    fn gated_add_backward(y: CubeTensor, gate: CubeTensor, d_z: CubeTensor, wanted: [bool; 2]) -> Cotangents<Self, 2> {
        let [y_wanted, gate_wanted] = wanted;
        let (gate, d_z) = (Expression::<Self>(gate), Expression(d_z));
        let is_shared = gate.dims::<2>()[0] == 1;
        let d_gate = gate_wanted.then(|| sum_if_shared(Expression(y) * d_z.clone(), is_shared).0);
        // One elementwise product: an own kernel would not be faster than Burn's.
        let d_y = y_wanted.then(|| (d_z * gate).0);
        [d_y, d_gate]
    }
}

/// `gates` is the number of elements of `gate`, which has one row or the same number of rows as x.
#[cube(launch, address_type = "dynamic")]
fn forward(x: &[f32], y: &[f32], gate: &[f32], z: &mut [f32], count: usize, gates: usize) {
    let i = ABSOLUTE_POS;
    if i >= count {
        terminate!();
    }
    z[i] = x[i] + y[i] * gate[i % gates];
}
