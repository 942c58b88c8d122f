//! Activations on flex.

use burn::backend::{Flex, tensor::FloatTensor};

use super::Values;
use crate::ops::kernels::activation as kernels;
use crate::ops::{Activation, ActivationKernel};

impl ActivationKernel for Flex {
    fn activation_forward(activation: Activation, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = Values::of(x);
        x.like(kernels::forward(activation, x.slice()))
    }

    fn activation_backward(activation: Activation, x: FloatTensor<Self>, d_y: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, d_y) = (Values::of(x), Values::of(d_y));
        x.like(kernels::backward(activation, x.slice(), d_y.slice()))
    }
}
