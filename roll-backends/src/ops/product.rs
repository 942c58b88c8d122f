//! Matrix products with f32 accumulation and f32 results, whatever the operands are.
//!
//! `Tensor::matmul` leaves both to the backend: it may round the sums of bf16 products, and on NVIDIA GPUs CubeCL
//! computes f32 in TF32, which keeps eleven significant bits per operand.

use burn_tensor::{DType, Tensor};

use super::Kernels;
use super::expression::Expression;
use super::operator::{Operator, Pullback, call};
use crate::backend::{Backend, tensor::FloatTensor as Floats};

/// The product `a b` of `[M, K]` and `[K, N]`, in f32. It equals `Tensor::matmul` of f32 operands on backends that
/// compute f32 in f32.
pub fn product(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    assert_eq!(a.dims()[1], b.dims()[0], "columns and rows of a product of {:?} and {:?}", a.dims(), b.dims());
    call(Product, [a, b].map(Tensor::into_dispatch))
}

/// See [`product`]; the operands are a and b.
struct Product;

impl Operator<2> for Product {
    fn record<B: Kernels>(
        self,
        [a, b]: [Floats<B>; 2],
        [a_wanted, b_wanted]: [bool; 2],
    ) -> (Floats<B>, impl Pullback<B, 2>) {
        let y = B::product(a.clone(), b.clone());
        (y, move |d_y| {
            let (a, b, d_y) = (Expression::<B>(a), Expression::<B>(b), Expression::<B>(d_y));
            let d_a = a_wanted.then(|| d_y.clone().matmul(b.t()).0);
            let d_b = b_wanted.then(|| a.t().matmul(d_y).0);
            [d_a, d_b]
        })
    }
}

/// Matrix products on one backend.
pub trait ProductKernel: Backend {
    /// The product `a b` as f32, batched over the leading axes. Operands are f32 or bf16. If their dtypes differ, both
    /// are multiplied as f32.
    fn product(a: Floats<Self>, b: Floats<Self>) -> Floats<Self> {
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
