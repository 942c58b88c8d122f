//! Matrix products with f32 accumulation and f32 results, whatever the operands are.
//!
//! `Tensor::matmul` leaves both to the backend: it may round the sums of bf16 products, and on NVIDIA GPUs CubeCL
//! computes f32 in TF32, which keeps eleven significant bits per operand.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Tensor};

use super::expression::Expression;
use super::record::record;

/// The product `a b` of `[M, K]` and `[K, N]`, all f32. Equals `Tensor::matmul` on backends that compute f32 in f32.
pub fn product(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    assert_eq!(a.dims()[1], b.dims()[0], "columns and rows of a product of {:?} and {:?}", a.dims(), b.dims());
    Tensor::from_dispatch(<Dispatch as ProductOps>::matrix_product(a.into_dispatch(), b.into_dispatch()))
}

/// Backend dispatch of matrix products. A backend implements [`ProductKernel`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    LibTorch: cfg(feature = "libtorch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait ProductOps: Backend {
    /// See [`product`].
    fn matrix_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Matrix products on one backend.
pub trait ProductKernel: Backend {
    /// The product `a b` as f32, batched over the leading axes. Both operands have one dtype, f32 or bf16.
    fn product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        let [a, b] = [a, b].map(|x| Expression::<Self>(x).cast(DType::F32).0);
        Self::float_matmul(a, b)
    }
}

impl<B: ProductKernel> Expression<B> {
    /// See [`ProductKernel::product`].
    pub fn matmul(self, other: Self) -> Self {
        Self(B::product(self.0, other.0))
    }
}

impl<B: ProductKernel> ProductOps for B {
    fn matrix_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::product(a, b)
    }
}

impl<B: ProductKernel, C: CheckpointStrategy> ProductOps for Autodiff<B, C> {
    fn matrix_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        record::<B, C, _, 2>([a, b], |[a, b]| {
            let y = B::product(a.clone(), b.clone());
            (y, move |d_y: FloatTensor<B>, [a_wanted, b_wanted]: [bool; 2]| {
                let (a, b, d_y) = (Expression::<B>(a), Expression::<B>(b), Expression::<B>(d_y));
                let d_a = a_wanted.then(|| d_y.clone().matmul(b.t()).0);
                let d_b = b_wanted.then(|| a.t().matmul(d_y).0);
                [d_a, d_b]
            })
        })
    }
}
