//! Starts backward passes from a given cotangent.

use burn_tensor::{FloatDType, Shape, Tensor};

use super::Kernels;
use super::operator::{Operator, Pullback, call};
use crate::backend::{TensorMetadata, tensor::FloatTensor as Floats};

/// A scalar whose gradient with respect to `y` is `cotangent`. Its value is 0 and meaningless.
///
/// `seed(y, g).backward()` computes the same gradients as `(y * g).sum().backward()`, without its four passes over
/// memory. The scalar must be differentiated directly or added to other seeds: a factor on it would have no effect.
pub fn seed<const D: usize>(y: Tensor<D>, cotangent: Tensor<D>) -> Tensor<1> {
    assert_eq!(y.dims(), cotangent.dims(), "a value and its cotangent");
    call(Seed { cotangent }, [y.into_dispatch()])
}

/// See [`seed`]; the operand is y.
struct Seed<const D: usize> {
    cotangent: Tensor<D>,
}

impl<const D: usize> Operator<1> for Seed<D> {
    fn record<B: Kernels>(self, [y]: [Floats<B>; 1], _: [bool; 1]) -> (Floats<B>, impl Pullback<B, 1>) {
        let zero = B::float_zeros(Shape::new([1]), &y.device(), FloatDType::from(y.dtype()));
        let cotangent = B::constant(self.cotangent.into_dispatch());
        (zero, move |_| [Some(cotangent)])
    }
}
