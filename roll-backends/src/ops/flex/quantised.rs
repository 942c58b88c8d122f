//! Linear layers with block-quantised weights, and eight-bit matrices, on flex.

use burn_tensor::DType;
use rayon::prelude::*;

use super::{Values, cast, tensor};
use crate::backend::{Flex, TensorMetadata, flex::FlexTensor};
use crate::ops::kernels::row_products::{Stored, forward, pull};
use crate::ops::{BlockKernel, Fp8Kernel, ScaledKernel};
use crate::{BlockMatrix, EightBits};

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
        tensor(pull(rows, d_y.slice(), weight), [rows, weight.shape()[1]])
    }
}

impl Fp8Kernel for Flex {}

impl ScaledKernel for Flex {
    fn decoded(kind: EightBits, codes: FlexTensor, scales: FlexTensor, dtype: DType) -> FlexTensor {
        let ([rows, columns], codes, scales) = (codes.shape().dims::<2>(), codes.to_contiguous(), Values::of(scales));
        let codes = &codes.storage::<u8>()[codes.layout().start_offset()..][..rows * columns];
        let (table, mut values) = (kind.table(), vec![0.0; rows * columns]);
        let columns_or_one = columns.max(1);
        let by_row = values.par_chunks_mut(columns_or_one).zip(codes.par_chunks(columns_or_one)).zip(scales.slice());
        by_row.for_each(|((values, codes), scale)| {
            values.iter_mut().zip(codes).for_each(|(value, code)| *value = table[usize::from(*code)] * scale);
        });
        cast(tensor(values, [rows, columns]), dtype)
    }
}
