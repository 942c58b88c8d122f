//! Activations on flex.

use burn::backend::{Flex, flex::FlexTensor};

use super::Values;
use crate::ops::kernels::activation as kernels;
use crate::ops::{Activation, ActivationKernel};

impl ActivationKernel for Flex {
    fn activation_forward(activation: Activation, x: FlexTensor) -> FlexTensor {
        let x = Values::of(x);
        x.like(kernels::forward(activation, x.slice()))
    }

    fn activation_backward(activation: Activation, x: FlexTensor, d_y: FlexTensor) -> FlexTensor {
        let (x, d_y) = (Values::of(x), Values::of(d_y));
        x.like(kernels::backward(activation, x.slice(), d_y.slice()))
    }
}
