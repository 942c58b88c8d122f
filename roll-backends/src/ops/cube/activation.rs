//! Activations, each in one pass over memory; GELU's exact form is composed of Burn's operations.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{elementwise_launch, empty_like, values};
use crate::backend::{Cube, TensorMetadata};
use crate::ops::activation::{composed_gelu, composed_gelu_backward};
use crate::ops::expression::Expression;
use crate::ops::{Activation, ActivationKernel};

/// `sqrt(2 / pi)`.
const GELU_SCALE: f32 = 0.797_884_56;
/// Coefficient of the cubic term of GELU's tanh form.
const GELU_CUBE: f32 = 0.044_715;
/// x is clamped to this magnitude in the derivative, so that its square stays finite. Beyond it, `s (1 - s)` is 0.
const SATURATED: f32 = 100.0;

impl ActivationKernel for Cube {
    fn activation_forward(activation: Activation, x: CubeTensor) -> CubeTensor {
        let x = values(x);
        if activation == Activation::Gelu {
            return composed_gelu(Expression::<Self>(x)).0;
        }
        let y = empty_like(&x);
        let count = x.shape().num_elements();
        if count > 0 {
            let (cubes, dim) = elementwise_launch(&x, count);
            let (client, address) = (x.client.clone(), x.required_address_type());
            let is_silu = activation == Activation::Silu;
            forward::launch(
                &client,
                cubes,
                dim,
                address,
                x.into_buffer_arg(),
                y.clone().into_buffer_arg(),
                count,
                is_silu,
            );
        }
        y
    }

    fn activation_backward(activation: Activation, x: CubeTensor, d_y: CubeTensor) -> CubeTensor {
        let (x, d_y) = (values(x), values(d_y));
        if activation == Activation::Gelu {
            return composed_gelu_backward(Expression::<Self>(x), Expression(d_y)).0;
        }
        let d_x = empty_like(&x);
        let count = x.shape().num_elements();
        if count > 0 {
            let (cubes, dim) = elementwise_launch(&x, count);
            let (client, address) = (x.client.clone(), x.required_address_type());
            let is_silu = activation == Activation::Silu;
            let (x, d_y, out) = (x.into_buffer_arg(), d_y.into_buffer_arg(), d_x.clone().into_buffer_arg());
            backward::launch(&client, cubes, dim, address, x, d_y, out, count, is_silu);
        }
        d_x
    }
}

/// The argument of the sigmoid: SiLU is `x * sigmoid(x)`, and GELU's tanh form `x * 0.5 (1 + tanh u) = x * sigmoid(2
/// u)`.
#[cube]
fn argument(x: f32, #[comptime] is_silu: bool) -> f32 {
    if comptime!(is_silu) { x } else { x * (x * x * GELU_CUBE + 1.0) * (2.0 * GELU_SCALE) }
}

#[cube(launch, address_type = "dynamic")]
fn forward(x: &[f32], y: &mut [f32], count: usize, #[comptime] is_silu: bool) {
    let i = ABSOLUTE_POS;
    if i >= count {
        terminate!();
    }
    y[i] = x[i] / (1.0 + (-argument(x[i], is_silu)).exp());
}

#[cube(launch, address_type = "dynamic")]
fn backward(x: &[f32], d_y: &[f32], d_x: &mut [f32], count: usize, #[comptime] is_silu: bool) {
    let i = ABSOLUTE_POS;
    if i >= count {
        terminate!();
    }
    // Both activations are x * s with s = sigmoid(a). Their derivative is s + s (1 - s) * (x da/dx).
    let clamped = clamp(x[i], -SATURATED, SATURATED);
    let s = 1.0 / (1.0 + (-argument(x[i], is_silu)).exp());
    let x_da_dx = if comptime!(is_silu) {
        clamped
    } else {
        clamped * (clamped * clamped * (3.0 * GELU_CUBE) + 1.0) * (2.0 * GELU_SCALE)
    };
    d_x[i] = d_y[i] * (s + s * (1.0 - s) * x_da_dx);
}
