//! Linear layers with block-quantised (GGUF) weights, which stay quantised in memory.

use std::sync::Arc;

use burn_tensor::{DType, Tensor, TensorData};

use super::Kernels;
use super::expression::Expression;
use super::linear::{bias_gradient, checked_bias};
use super::operator::{Operator, Pullback, call};
use super::product::ProductKernel;
use crate::BlockMatrix;
use crate::backend::{Backend, TensorMetadata, tensor::FloatTensor as Floats};

/// Returns `x W^T + b` for a frozen, block-quantised weight: x `[L, in]` (converted to f32), weight `[out, in]`, bias
/// `[out]`, result f32 `[L, out]`. Differentiable in x and the bias.
pub fn linear_blocks(x: Tensor<2>, weight: &Arc<BlockMatrix>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let bias = checked_bias(&x, weight.shape(), bias);
    call(LinearBlocks(weight.clone()), [x.cast(DType::F32).into_dispatch(), bias.into_dispatch()])
}

/// See [`linear_blocks`]; the operands are x and the bias.
struct LinearBlocks(Arc<BlockMatrix>);

impl Operator<2> for LinearBlocks {
    fn record<B: Kernels>(
        self,
        [x, bias]: [Floats<B>; 2],
        [x_wanted, bias_wanted]: [bool; 2],
    ) -> (Floats<B>, impl Pullback<B, 2>) {
        let y = B::blocks_forward(x, bias, &self.0);
        (y, move |d_y: Floats<B>| {
            let d_bias = bias_wanted.then(|| bias_gradient::<B>(d_y.clone()));
            let d_x = x_wanted.then(|| B::blocks_backward(d_y, &self.0));
            [d_x, d_bias]
        })
    }
}

/// The layer and its gradient on one backend. By default, the whole weight is decoded for every product.
pub trait BlockKernel: ProductKernel {
    /// See [`linear_blocks`].
    fn blocks_forward(x: Floats<Self>, bias: Floats<Self>, weight: &BlockMatrix) -> Floats<Self> {
        let [outputs, _] = weight.shape();
        let decoded = decode_whole::<Self>(weight, &bias);
        (Expression::<Self>(x).matmul(decoded.t()) + Expression::<Self>(bias).reshape([1, outputs])).0
    }

    /// The cotangent of x, for the cotangent `d_y` of the result.
    fn blocks_backward(d_y: Floats<Self>, weight: &BlockMatrix) -> Floats<Self> {
        let decoded = decode_whole::<Self>(weight, &d_y);
        Expression::<Self>(d_y).matmul(decoded).0
    }
}

/// Decodes the whole matrix to f32, on the device of `like`.
fn decode_whole<B: Backend>(weight: &BlockMatrix, like: &Floats<B>) -> Expression<B> {
    let shape = weight.shape();
    Expression(B::float_from_data(TensorData::new(weight.decode(0..shape[0]), shape), &like.device()))
}
