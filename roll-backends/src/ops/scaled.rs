//! Linear layers with eight-bit weights.

use burn::backend::tensor::{FloatTensor as Floats, IntTensor};
use burn::backend::{Backend, BackendTensor, TensorMetadata};
use burn::tensor::{DType, Int, IntDType, Shape, Slice, Tensor, TensorData};

use super::expression::Expression;
use super::linear::{bias_gradient, checked_bias};
use super::operator::{Kernels, Operator, Primitives, Pullback, call, with_backend};
use super::product::ProductKernel;
use crate::{EightBits, ScaledMatrix};

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

/// The numbers that `codes` represent, f32, without the scales.
pub(crate) fn decoded_codes(kind: EightBits, codes: Tensor<2, Int>) -> Tensor<2> {
    let codes = codes.into_dispatch();
    let values = with_backend!(codes, B => {
        B::wrap(BackendTensor::Float(B::values_of_codes(kind, B::unwrap(codes).int(), DType::F32)))
    });
    Tensor::from_dispatch(values)
}

/// See [`linear_scaled`]; the operands are x and the bias.
struct LinearScaled(ScaledMatrix);

impl Operator<2> for LinearScaled {
    fn record<B: Kernels>(self, [x, bias]: [Floats<B>; 2], wanted: [bool; 2]) -> (Floats<B>, impl Pullback<B, 2>) {
        let ScaledMatrix { kind, codes, scales, .. } = self.0;
        let scales = B::constant(scales.into_dispatch());
        let weight = Scaled { kind, codes: B::unwrap(codes.into_dispatch()).int(), scales };
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
    /// The number format of the codes.
    pub kind: EightBits,
    /// The codes, `[out, in]`.
    pub codes: IntTensor<B>,
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

    /// The numbers that `codes` (`[rows, columns]`) represent, as `dtype`.
    fn values_of_codes(kind: EightBits, codes: IntTensor<Self>, dtype: DType) -> Floats<Self> {
        let ([rows, columns], device) = (codes.shape().dims::<2>(), codes.device());
        let table = Self::float_from_data(TensorData::new(kind.table().to_vec(), [256]), &device);
        let indices = Self::int_cast(Self::int_reshape(codes, Shape::new([rows * columns])), IntDType::I32);
        let values = Self::float_select(Expression::<Self>(table).cast(dtype).0, 0, indices);
        Expression::<Self>(values).reshape([rows, columns]).0
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
        let codes = B::int_slice(self.codes.clone(), &part.map(Slice::from));
        Expression(B::values_of_codes(self.kind, codes, dtype))
    }
}
