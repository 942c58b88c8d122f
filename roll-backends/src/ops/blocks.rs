//! Linear layers with block-quantised (GGUF) weights.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Tensor, TensorData};

use super::expression::Expression;
use super::linear::checked_bias;
use super::product::ProductKernel;
use super::record::record;
use crate::BlockMatrix;

/// Returns `x W^T + b` for a frozen, block-quantised weight: x `[L, in]` (converted to f32), weight `[out, in]`, bias
/// `[out]`, result f32 `[L, out]`. Differentiable in x and the bias.
pub fn linear_blocks(x: Tensor<2>, weight: &Arc<BlockMatrix>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let bias = checked_bias(&x, weight.shape(), bias);
    let x = if x.dtype() == DType::F32 { x } else { x.cast(DType::F32) };
    let (x, bias) = (x.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(<Dispatch as BlockOps>::linear_blocks(x, bias, weight.clone()))
}

/// Backend dispatch of the layer. A backend implements [`BlockKernel`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    LibTorch: cfg(feature = "libtorch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait BlockOps: Backend {
    /// See [`linear_blocks`].
    fn linear_blocks(x: FloatTensor<Self>, bias: FloatTensor<Self>, weight: Arc<BlockMatrix>) -> FloatTensor<Self>;
}

/// The layer and its gradient on one backend. By default, the whole weight is decoded for every product.
pub trait BlockKernel: ProductKernel {
    /// See [`linear_blocks`].
    fn blocks_forward(x: FloatTensor<Self>, bias: FloatTensor<Self>, weight: &BlockMatrix) -> FloatTensor<Self> {
        let [outputs, _] = weight.shape();
        let (x, weight) = (Expression::<Self>(x), decoded::<Self>(weight, &bias));
        (x.matmul(weight.t()) + Expression::<Self>(bias).reshape([1, outputs])).0
    }

    /// The cotangent of x, for the cotangent `d_y` of the result.
    fn blocks_backward(d_y: FloatTensor<Self>, weight: &BlockMatrix) -> FloatTensor<Self> {
        let weight = decoded::<Self>(weight, &d_y);
        Expression::<Self>(d_y).matmul(weight).0
    }
}

/// Decodes the whole matrix to f32, on the device of `beside`.
fn decoded<B: Backend>(weight: &BlockMatrix, beside: &FloatTensor<B>) -> Expression<B> {
    use burn::backend::TensorMetadata;
    let shape = weight.shape();
    Expression(B::float_from_data(TensorData::new(weight.decode(0..shape[0]), shape), &beside.device()))
}

impl<B: BlockKernel> BlockOps for B {
    fn linear_blocks(x: FloatTensor<B>, bias: FloatTensor<B>, weight: Arc<BlockMatrix>) -> FloatTensor<B> {
        B::blocks_forward(x, bias, &weight)
    }
}

impl<B: BlockKernel, C: CheckpointStrategy> BlockOps for Autodiff<B, C> {
    fn linear_blocks(x: FloatTensor<Self>, bias: FloatTensor<Self>, weight: Arc<BlockMatrix>) -> FloatTensor<Self> {
        record::<B, C, _, 2>([x, bias], |[x, bias]| {
            let y = B::blocks_forward(x, bias, &weight);
            (y, move |d_y: FloatTensor<B>, [x_wanted, bias_wanted]: [bool; 2]| {
                let d_bias = bias_wanted.then(|| {
                    let [outputs, _] = weight.shape();
                    Expression::<B>(d_y.clone()).sum(0).reshape([outputs]).0
                });
                [x_wanted.then(|| B::blocks_backward(d_y, &weight)), d_bias]
            })
        })
    }
}
