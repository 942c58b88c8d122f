//! Linear layers with block-quantised weights on flex.

use burn::backend::{Flex, TensorMetadata, flex::FlexTensor};

use super::{Values, tensor};
use crate::BlockMatrix;
use crate::ops::BlockKernel;
use crate::ops::kernels::row_products::{Stored, forward, pull};

impl BlockKernel for Flex {
    fn blocks_forward(x: FlexTensor, bias: FlexTensor, weight: &BlockMatrix) -> FlexTensor {
        let [rows, inputs] = x.shape().dims::<2>();
        let (x, bias) = (Values::of(x), Values::of(bias));
        let y = forward(rows, inputs, x.slice(), Stored::Blocks(weight), bias.slice());
        tensor(y, [rows, weight.shape()[0]])
    }

    fn blocks_backward(d_y: FlexTensor, weight: &BlockMatrix) -> FlexTensor {
        let [rows, _] = d_y.shape().dims::<2>();
        let d_y = Values::of(d_y);
        let decode = |rows, columns, values: &mut [f32]| weight.decode_part(rows, columns, values);
        tensor(pull(rows, d_y.slice(), weight.shape(), decode), [rows, weight.shape()[1]])
    }
}
