//! Linear layers with eight-bit weights, and the decoding of eight-bit matrices.

use burn_tensor::{DType, Int, IntDType, Shape, Tensor, TensorData};

use super::Kernels;
use super::expression::Expression;
use super::linear::{Lora, SavedLinear, check_lora, checked_bias};
use super::operator::{Operator, Primitives, Pullback, call, with_backend};
use super::product::ProductKernel;
use crate::backend::tensor::{FloatTensor as Floats, IntTensor};
use crate::backend::{BackendTensor, TensorMetadata};
use crate::{EightBits, ScaledMatrix};

/// Returns `x W^T + b` and, with `lora` (A, B and their factor), `+ scale * (x A^T) B^T`, for a frozen eight-bit
/// weight: x `[L, in]`, weight `[out, in]`, bias `[out]`, result `[L, out]` in the dtype of x.
///
/// The matrix is decoded to `product_dtype`, f32 or bf16, in each pass and dropped after it; the rest is
/// [`super::linear`] or [`super::linear_lora`]. Each number of the matrix is rounded after its product with the scale
/// of its row. Panics if the shapes do not match.
pub fn linear_scaled(
    x: Tensor<2>,
    weight: &ScaledMatrix,
    bias: Option<Tensor<1>>,
    lora: Option<(Tensor<2>, Tensor<2>, f64)>,
    product_dtype: DType,
) -> Tensor<2> {
    let (bias, dtype) = (checked_bias(&x, *weight.shape(), bias).into_dispatch(), x.dtype());
    let (x, weight) = (x.cast(product_dtype).into_dispatch(), weight.clone());
    match lora {
        None => call(LinearScaled { weight, product_dtype, dtype }, [x, bias]),
        Some((down, up, scale)) => {
            check_lora(*weight.shape(), &down, &up);
            let layer = LinearScaled { weight, product_dtype, dtype };
            call(LinearScaledLora { layer, scale: scale as f32 }, [x, bias, down.into_dispatch(), up.into_dispatch()])
        }
    }
}

impl ScaledMatrix {
    /// Decodes `count` rows from `start` on to f32.
    pub fn rows(&self, start: usize, count: usize) -> Tensor<2> {
        decoded(self.kind, self.codes.clone().narrow(0, start, count), self.scales.clone().narrow(0, start, count))
    }

    /// Decodes the rows with the given indices to f32.
    pub fn select(&self, rows: Tensor<1, Int>) -> Tensor<2> {
        decoded(self.kind, self.codes.clone().select(0, rows.clone()), self.scales.clone().select(0, rows))
    }
}

/// The matrix of the numbers that `codes` represent times the scale of each row, f32.
fn decoded(kind: EightBits, codes: Tensor<2, Int>, scales: Tensor<1>) -> Tensor<2> {
    let [codes, scales] = [codes.into_dispatch(), scales.into_dispatch()];
    let values = with_backend!(codes, B => {
        let values = B::decoded(kind, B::backend_tensor(codes).int(), B::constant(scales), DType::F32);
        B::wrap(BackendTensor::Float(values))
    });
    Tensor::from_dispatch(values)
}

/// See [`linear_scaled`]; the operands are x and the bias.
struct LinearScaled {
    weight: ScaledMatrix,
    /// The dtype of the products, to which the weight is decoded.
    product_dtype: DType,
    /// The dtype of the result.
    dtype: DType,
}

impl LinearScaled {
    /// The weight, decoded on the backend `B`.
    fn decoded<B: Kernels>(&self) -> Floats<B> {
        let ScaledMatrix { kind, codes, scales, .. } = self.weight.clone();
        let codes = B::backend_tensor(codes.into_dispatch()).int();
        B::decoded(kind, codes, B::constant(scales.into_dispatch()), self.product_dtype)
    }
}

impl Operator<2> for LinearScaled {
    fn record<B: Kernels>(
        self,
        [x, bias]: [Floats<B>; 2],
        [x_wanted, bias_wanted]: [bool; 2],
    ) -> (Floats<B>, impl Pullback<B, 2>) {
        let no_lora = None;
        let (y, _) = B::linear_forward_as(x.clone(), self.decoded::<B>(), bias, no_lora, self.dtype);
        (y, move |d_y| {
            let saved = SavedLinear { x, weight: self.decoded::<B>(), lora: None };
            let wanted = [x_wanted, false, bias_wanted, false, false];
            let [d_x, _, d_bias, ..] = B::linear_backward(saved, d_y, wanted);
            [d_x, d_bias]
        })
    }
}

/// See [`linear_scaled`]; the operands are x, bias, down and up.
struct LinearScaledLora {
    layer: LinearScaled,
    scale: f32,
}

impl Operator<4> for LinearScaledLora {
    fn record<B: Kernels>(
        self,
        [x, bias, down, up]: [Floats<B>; 4],
        [x_wanted, bias_wanted, down_wanted, up_wanted]: [bool; 4],
    ) -> (Floats<B>, impl Pullback<B, 4>) {
        let Self { layer, scale } = self;
        let lora = Lora { down, up, scale };
        let (y, inner) = B::linear_forward_as(x.clone(), layer.decoded::<B>(), bias, Some(lora.clone()), layer.dtype);
        (y, move |d_y| {
            let saved = SavedLinear { x, weight: layer.decoded::<B>(), lora: inner.map(|inner| (lora, inner)) };
            let wanted = [x_wanted, false, bias_wanted, down_wanted, up_wanted];
            let [d_x, _, d_bias, d_down, d_up] = B::linear_backward(saved, d_y, wanted);
            [d_x, d_bias, d_down, d_up]
        })
    }
}

/// Decodes eight-bit matrices on one backend.
pub trait ScaledKernel: ProductKernel {
    /// The matrix as `dtype`: the number of each code (`[rows, columns]`) times the scale of its row (`[rows]`).
    fn decoded(kind: EightBits, codes: IntTensor<Self>, scales: Floats<Self>, dtype: DType) -> Floats<Self> {
        let ([rows, columns], device) = (codes.shape().dims::<2>(), codes.device());
        let numbers = kind.table();
        let table = Self::float_from_data(TensorData::new(numbers.to_vec(), [numbers.len()]), &device);
        let indices = Self::int_cast(Self::int_reshape(codes, Shape::new([rows * columns])), IntDType::I32);
        let values = Expression::<Self>(Self::float_select(table, 0, indices)).reshape([rows, columns]);
        (values * Expression(scales).reshape([rows, 1])).cast(dtype).0
    }
}
