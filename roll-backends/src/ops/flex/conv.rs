//! The convolution.

use burn::backend::{Flex, TensorMetadata, tensor::FloatTensor};

use super::{Values, tensor};
use crate::ops::kernels::conv::{Shape, backward, forward};
use crate::ops::{ConvKernel, Cotangents};

fn shape(x: &FloatTensor<Flex>, weight: &FloatTensor<Flex>, padding: [usize; 3]) -> Shape {
    let ([inputs, size @ ..], [outputs, _, kernel @ ..]) = (x.shape().dims::<4>(), weight.shape().dims::<5>());
    Shape { inputs, outputs, size, kernel, padding }
}

impl ConvKernel for Flex {
    fn conv_forward([x, weight, bias]: [FloatTensor<Self>; 3], padding: [usize; 3]) -> FloatTensor<Self> {
        let shape = shape(&x, &weight, padding);
        let [t, h, w] = shape.output().unwrap_or_default();
        let (x, weight, bias) = (Values::of(x), Values::of(weight), Values::of(bias));
        tensor(forward(shape, x.slice(), weight.slice(), bias.slice()), [shape.outputs, t, h, w])
    }

    fn conv_backward(
        [x, weight]: [FloatTensor<Self>; 2],
        padding: [usize; 3],
        d_y: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        let shape = shape(&x, &weight, padding);
        let (x, weight, d_y) = (Values::of(x), Values::of(weight), Values::of(d_y));
        let [d_x, d_weight, d_bias] = backward(shape, x.slice(), weight.slice(), d_y.slice(), wanted);
        [d_x.map(|d| x.like(d)), d_weight.map(|d| weight.like(d)), d_bias.map(|d| tensor(d, [shape.outputs]))]
    }
}
