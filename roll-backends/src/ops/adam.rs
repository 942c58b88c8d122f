//! The AdamW update on a device.

use burn_tensor::Tensor;
use roll_core::AdamUpdate;

use super::expression::Expression;
use super::operator::{Primitives, with_backend};
use crate::backend::{Backend, tensor::FloatTensor as Floats};

/// Applies one AdamW update and returns the new parameters and the new first and second moment. All tensors are f32 of
/// one length, without autodiff. Operands may be overwritten only if they have no other handle.
///
/// The result on flex is bit-equal to [`crate::optimizer::AdamW`]; other backends may round differently.
pub fn adam(
    parameters: Tensor<1>,
    gradient: Tensor<1>,
    [first_moment, second_moment]: [Tensor<1>; 2],
    update: AdamUpdate,
) -> (Tensor<1>, [Tensor<1>; 2]) {
    let length = parameters.dims();
    let lengths = [gradient.dims(), first_moment.dims(), second_moment.dims()];
    assert!(lengths.iter().all(|other| *other == length), "an update of {length:?} parameters by {lengths:?}");
    let operands = [parameters, gradient, first_moment, second_moment].map(Tensor::into_dispatch);
    let [parameters, first_moment, second_moment] = with_backend!(operands[0], B => {
        B::adam_update(operands.map(B::constant), &update).map(B::tensor)
    });
    (parameters, [first_moment, second_moment])
}

/// The update on one backend.
pub trait AdamKernel: Backend {
    /// Takes parameters, gradient, first and second moment (in this order), and returns the new parameters and both
    /// new moments; see [`adam`].
    fn adam_update(operands: [Floats<Self>; 4], update: &AdamUpdate) -> [Floats<Self>; 3] {
        composed::<Self>(operands, update)
    }
}

/// The update composed of primitive operations, in the order in which [`AdamUpdate`] writes them.
pub(super) fn composed<B: Backend>(operands: [Floats<B>; 4], update: &AdamUpdate) -> [Floats<B>; 3] {
    let [p, g, m, v] = operands.map(Expression::<B>);
    let AdamUpdate { scale, beta_2, rest, eps, step_size, root_correction, keep } = *update;
    // Omits the pass over memory if the factor is 1.
    let scaled = |x: Expression<B>, factor: f32| if factor == 1.0 { x } else { x * f64::from(factor) };
    let g = scaled(scaled(g, scale[0]), scale[1]);
    let m = m.clone() + (g.clone() - m) * f64::from(rest[0]);
    let v = v * f64::from(beta_2) + g.clone() * f64::from(rest[1]) * g;
    let denominator = v.clone().sqrt() / f64::from(root_correction) + f64::from(eps);
    let p = scaled(p, keep) - m.clone() / denominator * f64::from(step_size);
    [p.0, m.0, v.0]
}
