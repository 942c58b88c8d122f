//! Linear layers with block-quantised and eight-bit weights on flex.

use burn::backend::{Flex, TensorMetadata, flex::FlexTensor};
use burn::tensor::DType;

use super::{Values, cast, tensor};
use crate::BlockMatrix;
use crate::ops::BlockKernel;
use crate::ops::kernels::row_products::{Codes, Stored, forward, pull};
use crate::ops::scaled::{Scaled, ScaledKernel};

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

impl ScaledKernel for Flex {
    fn scaled_forward(x: FlexTensor, bias: FlexTensor, weight: &Scaled<Self>) -> FlexTensor {
        let [rows, inputs] = x.shape().dims::<2>();
        let (x, bias) = (Values::of(x), Values::of(bias));
        let y = with_codes(weight, |codes| forward(rows, inputs, x.slice(), Stored::Codes(codes), bias.slice()));
        tensor(y, [rows, weight.shape()[0]])
    }

    fn scaled_backward(d_y: FlexTensor, weight: &Scaled<Self>, dtype: DType) -> FlexTensor {
        let [rows, _] = d_y.shape().dims::<2>();
        let d_y = Values::of(d_y);
        let part = |codes: Codes| {
            pull(rows, d_y.slice(), weight.shape(), |rows, columns, values| codes.decode_part(rows, columns, values))
        };
        cast(tensor(with_codes(weight, part), [rows, weight.shape()[1]]), dtype)
    }
}

/// Runs `f` on the host slices of the weight.
fn with_codes<T>(weight: &Scaled<Flex>, f: impl FnOnce(Codes) -> T) -> T {
    let [outputs, inputs] = weight.shape();
    let (table, scales) = (weight.kind.table(), Values::of(weight.scales.clone()));
    let codes = weight.codes.to_contiguous();
    let values = &codes.storage::<u8>()[codes.layout().start_offset()..][..outputs * inputs];
    f(Codes { values, table: &table, scales: scales.slice(), inputs })
}
