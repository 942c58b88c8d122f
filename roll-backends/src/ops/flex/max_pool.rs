//! Max pooling on flex.

use super::{Values, tensor};
use crate::backend::flex::FlexTensor;
use crate::backend::tensor::IntTensor;
use crate::backend::{Flex, TensorMetadata};
use crate::ops::kernels::max_pool::{self as kernels, MaxPoolShape};
use crate::ops::{MaxPoolKernel, MaxPoolWindow};

fn shape_of([items, channels, rows, columns]: [usize; 4], window: MaxPoolWindow) -> MaxPoolShape {
    let size = [rows, columns];
    MaxPoolShape { window, planes: items * channels, size, output: window.output(size).unwrap_or_default() }
}

impl MaxPoolKernel for Flex {
    fn max_pool_forward(x: FlexTensor, window: MaxPoolWindow, _: bool) -> (FlexTensor, Option<IntTensor<Self>>) {
        let dims @ [items, channels, ..] = x.shape().dims::<4>();
        let (shape, x) = (shape_of(dims, window), Values::of(x));
        let [rows, columns] = shape.output;
        // The backward pass searches the maxima again instead of keeping their indices.
        (tensor(kernels::forward(shape, x.slice()), [items, channels, rows, columns]), None)
    }

    fn max_pool_backward(
        x: FlexTensor,
        y: FlexTensor,
        _: Option<IntTensor<Self>>,
        window: MaxPoolWindow,
        d_y: FlexTensor,
    ) -> FlexTensor {
        let shape = shape_of(x.shape().dims(), window);
        let (x, y, d_y) = (Values::of(x), Values::of(y), Values::of(d_y));
        x.like(kernels::backward(shape, x.slice(), y.slice(), d_y.slice()))
    }
}
