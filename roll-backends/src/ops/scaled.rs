//! Linear layers with eight-bit weights.

use burn::backend::tensor::{FloatTensor as Floats, IntTensor};
use burn::backend::{Backend, BackendTensor, TensorMetadata};
use burn::tensor::{DType, Int, IntDType, Shape, Slice, Tensor};

use super::expression::Expression;
use super::linear::{bias_gradient, checked_bias};
use super::operator::{Kernels, Operator, Primitives, Pullback, call, with_backend};
use super::product::ProductKernel;
use crate::ScaledMatrix;

/// Elements that are decoded at a time.
const PANEL: usize = 1 << 24;

/// Returns `x W^T + b` as f32 for a frozen eight-bit weight: x `[L, in]`, weight `[out, in]`, bias `[out]`, result
/// `[L, out]`. Differentiable in x and the bias.
///
/// The product is taken in the dtype of x, f32 or bf16 (on flex always in f32). Codes are decoded to that dtype part by
/// part, which is exact. The scales multiply the columns of the result, and of the cotangent in the backward pass.
pub fn linear_scaled(x: Tensor<2>, weight: &ScaledMatrix, bias: Option<Tensor<1>>) -> Tensor<2> {
    let bias = checked_bias(&x, *weight.shape(), bias);
    call(LinearScaled(weight.clone()), [x.into_dispatch(), bias.into_dispatch()])
}

/// The numbers that `codes` represent, f32, without the scales. `table` has the number of each code.
pub(crate) fn decoded_codes(codes: Tensor<2, Int>, table: Tensor<1>) -> Tensor<2> {
    let shape = codes.dims();
    let [codes, table] = [codes.into_dispatch(), table.into_dispatch()];
    let values = with_backend!(codes, B => {
        let values = B::values_of_codes(B::constant(table), B::unwrap(codes).int());
        B::wrap(BackendTensor::Float(Expression::<B>(values).reshape(shape).0))
    });
    Tensor::from_dispatch(values)
}

/// See [`linear_scaled`]; the operands are x and the bias.
struct LinearScaled(ScaledMatrix);

impl Operator<2> for LinearScaled {
    fn record<B: Kernels>(self, [x, bias]: [Floats<B>; 2], wanted: [bool; 2]) -> (Floats<B>, impl Pullback<B, 2>) {
        let ScaledMatrix { codes, table, scales, .. } = self.0;
        let [table, scales] = [table, scales].map(|x| B::constant(x.into_dispatch()));
        let weight = Scaled { codes: B::unwrap(codes.into_dispatch()).int(), table, scales };
        let dtype = x.dtype();
        let y = B::scaled_forward(x, bias, &weight);
        (y, move |d_y: Floats<B>| {
            let d_bias = wanted[1].then(|| bias_gradient::<B>(d_y.clone()));
            [wanted[0].then(|| B::scaled_backward(d_y, &weight, dtype)), d_bias]
        })
    }
}

/// An eight-bit matrix in a backend's primitives; see [`ScaledMatrix`].
pub struct Scaled<B: Backend> {
    /// The codes, `[out, in]`.
    pub codes: IntTensor<B>,
    /// The number of each code, `[256]`.
    pub table: Floats<B>,
    /// The scale of each row, `[out]`.
    pub scales: Floats<B>,
}

/// The layer and its gradient on one backend.
pub trait ScaledKernel: ProductKernel {
    /// See [`linear_scaled`].
    fn scaled_forward(x: Floats<Self>, bias: Floats<Self>, weight: &Scaled<Self>) -> Floats<Self> {
        forward_by_panels(x, bias, weight, PANEL)
    }

    /// The cotangent of x. The product and the result are in `dtype`.
    fn scaled_backward(d_y: Floats<Self>, weight: &Scaled<Self>, dtype: DType) -> Floats<Self> {
        backward_by_panels(d_y, weight, dtype, PANEL)
    }

    /// The number of `table` for each of `codes`, flat.
    fn values_of_codes(table: Floats<Self>, codes: IntTensor<Self>) -> Floats<Self> {
        let count = codes.shape().num_elements();
        let indices = Self::int_cast(Self::int_reshape(codes, Shape::new([count])), IntDType::I32);
        Self::float_select(table, 0, indices)
    }
}

/// [`ScaledKernel::scaled_forward`] by panels of `panel` elements.
pub(super) fn forward_by_panels<B: ScaledKernel>(
    x: Floats<B>,
    bias: Floats<B>,
    weight: &Scaled<B>,
    panel: usize,
) -> Floats<B> {
    let (x, [outputs, inputs]) = (Expression::<B>(x), weight.shape());
    let rows = (panel / inputs.max(1)).max(1);
    let parts = (0..outputs).step_by(rows).map(|first| {
        let panel = weight.decoded([first..(first + rows).min(outputs), 0..inputs], x.dtype());
        x.clone().matmul(panel.t())
    });
    let y = Expression::cat(parts.collect(), 1);
    (y * weight.scale_row() + Expression(bias).reshape([1, outputs])).0
}

/// [`ScaledKernel::scaled_backward`] by panels of `panel` elements.
pub(super) fn backward_by_panels<B: ScaledKernel>(
    d_y: Floats<B>,
    weight: &Scaled<B>,
    dtype: DType,
    panel: usize,
) -> Floats<B> {
    let [outputs, inputs] = weight.shape();
    let d_y = (Expression::<B>(d_y) * weight.scale_row()).cast(dtype);
    let columns = (panel / outputs.max(1)).max(1);
    let parts = (0..inputs).step_by(columns).map(|first| {
        let panel = weight.decoded([0..outputs, first..(first + columns).min(inputs)], dtype);
        d_y.clone().matmul(panel)
    });
    Expression::cat(parts.collect(), 1).cast(dtype).0
}

impl<B: ScaledKernel> Scaled<B> {
    pub fn shape(&self) -> [usize; 2] {
        self.codes.shape().dims::<2>()
    }

    fn scale_row(&self) -> Expression<B> {
        let [outputs, _] = self.shape();
        Expression::<B>(self.scales.clone()).reshape([1, outputs])
    }

    /// Decodes some rows and columns, without the scales.
    fn decoded(&self, part: [std::ops::Range<usize>; 2], dtype: DType) -> Expression<B> {
        let shape = part.each_ref().map(|range| range.len());
        let codes = B::int_slice(self.codes.clone(), &part.map(Slice::from));
        let table = Expression::<B>(self.table.clone()).cast(dtype);
        Expression::<B>(B::values_of_codes(table.0, codes)).reshape(shape)
    }
}
