//! Linear layers whose products with frozen fp8 weights are taken in fp8.

use burn_tensor::{DType, FloatDType, Shape, Tensor};

use super::Kernels;
use super::expression::Expression;
use super::linear::{Lora, bias_gradient, check_lora, checked_bias, low_rank, low_rank_pull};
use super::operator::{Cotangents, Operator, Primitives, Pullback, call};
use super::scaled::ScaledKernel;
use crate::backend::{Backend, TensorMetadata, tensor::FloatTensor as Floats, tensor::IntTensor};
use crate::{EightBits, ScaledMatrix};

/// Returns the result of [`super::linear_scaled`] for a weight in e4m3. The products with the weight are computed in
/// fp8, in both passes. `lora` is A, B and their factor. Panics if the shapes do not match or the weight is in another
/// format.
///
/// Each row of x is divided by its scale, `amax / 448`, and rounded to e4m3 (to nearest, ties to even). The products of
/// the codes are summed in f32 and multiplied by the scale of the row and the scale of the weight's row. Tensor cores
/// round the result to bf16 before bias and LoRA are added in the dtype of x.
///
/// The product of the pullback sums over the weight's rows, so that it cannot apply their scales to its result.
/// Instead, the cotangent is multiplied by these scales and then rounded to e4m3 by row, like x. E5m2 has a wider
/// range, but rows with a scale of their own do not need it: in e4m3, numbers down to 2^-15 of the largest keep three
/// bits of mantissa, and e5m2 has only two.
///
/// LoRA is computed from x in `products` (f32 or bf16), as in other layers.
pub fn linear_fp8(
    x: Tensor<2>,
    weight: &ScaledMatrix,
    bias: Option<Tensor<1>>,
    lora: Option<(Tensor<2>, Tensor<2>, f64)>,
    products: DType,
) -> Tensor<2> {
    assert_eq!(weight.kind, EightBits::E4m3, "the format of a weight for products in fp8");
    let (bias, dtype) = (checked_bias(&x, *weight.shape(), bias).into_dispatch(), x.dtype());
    let layer = LinearFp8 { weight: weight.clone(), dtype };
    let x = x.cast(products).into_dispatch();
    match lora {
        None => call(layer, [x, bias]),
        Some((down, up, scale)) => {
            check_lora(*weight.shape(), &down, &up);
            let layer = LinearFp8Lora { layer, scale: scale as f32 };
            call(layer, [x, bias, down.into_dispatch(), up.into_dispatch()])
        }
    }
}

/// See [`linear_fp8`]; the operands are x and the bias.
struct LinearFp8 {
    weight: ScaledMatrix,
    /// The dtype of the result.
    dtype: DType,
}

impl LinearFp8 {
    /// The weight as tensors of the backend `B`.
    fn weight<B: Primitives>(&self) -> Fp8Weight<B> {
        let ScaledMatrix { codes, scales, .. } = self.weight.clone();
        let codes = B::backend_tensor(codes.into_dispatch()).int();
        Fp8Weight { codes, scales: B::constant(scales.into_dispatch()) }
    }
}

impl Operator<2> for LinearFp8 {
    fn record<B: Kernels>(
        self,
        [x, bias]: [Floats<B>; 2],
        [x_wanted, bias_wanted]: [bool; 2],
    ) -> (Floats<B>, impl Pullback<B, 2>) {
        let products = x.dtype();
        let no_lora = None;
        let (y, _) = B::fp8_forward(x, self.weight::<B>(), bias, no_lora, self.dtype);
        (y, move |d_y| {
            let saved = SavedFp8 { weight: self.weight::<B>(), products, lora: None };
            let wanted = [x_wanted, bias_wanted, false, false];
            let [d_x, d_bias, ..] = B::fp8_backward(saved, d_y, wanted);
            [d_x, d_bias]
        })
    }
}

/// See [`linear_fp8`]; the operands are x, bias, down and up.
struct LinearFp8Lora {
    layer: LinearFp8,
    scale: f32,
}

impl Operator<4> for LinearFp8Lora {
    fn record<B: Kernels>(
        self,
        [x, bias, down, up]: [Floats<B>; 4],
        wanted: [bool; 4],
    ) -> (Floats<B>, impl Pullback<B, 4>) {
        let Self { layer, scale } = self;
        let (products, lora) = (x.dtype(), Lora { down, up, scale });
        let (y, inner) = B::fp8_forward(x.clone(), layer.weight::<B>(), bias, Some(lora.clone()), layer.dtype);
        (y, move |d_y| {
            let lora = inner.map(|inner| SavedLora { x, lora, inner });
            B::fp8_backward(SavedFp8 { weight: layer.weight::<B>(), products, lora }, d_y, wanted)
        })
    }
}

/// A frozen matrix in e4m3.
pub struct Fp8Weight<B: Backend> {
    /// The codes, u8, `[out, in]`.
    pub codes: IntTensor<B>,
    /// The scale of each row, `[out]`.
    pub scales: Floats<B>,
}

/// The values of the forward pass that the backward pass needs.
pub struct SavedFp8<B: Backend> {
    pub weight: Fp8Weight<B>,
    /// The dtype of x.
    pub products: DType,
    pub lora: Option<SavedLora<B>>,
}

/// The values that LoRA's backward pass needs.
pub struct SavedLora<B: Backend> {
    pub x: Floats<B>,
    pub lora: Lora<Floats<B>>,
    /// `x A^T`.
    pub inner: Floats<B>,
}

/// The layer and its gradients on one backend.
pub trait Fp8Kernel: ScaledKernel {
    /// Rounds to the nearest number of e4m3, as f32; numbers beyond 448 become 448, and NaN stays NaN.
    fn to_e4m3(x: Floats<Self>) -> Floats<Self> {
        nearest_e4m3(Expression::<Self>(x).cast(DType::F32)).0
    }

    /// Returns the result in `dtype` and, with LoRA, `x A^T`; see [`linear_fp8`].
    fn fp8_forward(
        x: Floats<Self>,
        weight: Fp8Weight<Self>,
        bias: Floats<Self>,
        lora: Option<Lora<Floats<Self>>>,
        dtype: DType,
    ) -> (Floats<Self>, Option<Floats<Self>>) {
        emulated_forward::<Self>(x, weight, bias, lora, dtype)
    }

    /// Returns the gradients of x, bias, down and up that are `wanted`. The gradient of x has the dtype of x, all other
    /// gradients are f32.
    fn fp8_backward(saved: SavedFp8<Self>, d_y: Floats<Self>, wanted: [bool; 4]) -> Cotangents<Self, 4> {
        emulated_backward::<Self>(saved, d_y, wanted)
    }
}

/// See [`Fp8Kernel::fp8_forward`].
pub(super) fn emulated_forward<B: Fp8Kernel>(
    x: Floats<B>,
    weight: Fp8Weight<B>,
    bias: Floats<B>,
    lora: Option<Lora<Floats<B>>>,
    dtype: DType,
) -> (Floats<B>, Option<Floats<B>>) {
    let (x, scales) = (Expression::<B>(x), Expression::<B>(weight.scales));
    let [outputs] = scales.dims::<1>();
    let [numbers, row_scales] = scaled_rows(x.clone());
    let codes = numbers_of::<B>(weight.codes, x.dtype());
    let sums = numbers.cast(x.dtype()).matmul(codes.t());
    let y = sums * row_scales * scales.reshape([1, outputs]) + Expression(bias).cast(DType::F32).reshape([1, outputs]);
    let Some(lora) = lora else { return (y.cast(dtype).0, None) };
    let (lora_part, inner) = low_rank(x, lora);
    ((y + lora_part).cast(dtype).0, Some(inner.0))
}

/// See [`Fp8Kernel::fp8_backward`].
pub(super) fn emulated_backward<B: Fp8Kernel>(
    saved: SavedFp8<B>,
    d_y: Floats<B>,
    [x_wanted, bias_wanted, down_wanted, up_wanted]: [bool; 4],
) -> Cotangents<B, 4> {
    let SavedFp8 { weight, products, lora } = saved;
    let (d_y, scales) = (Expression::<B>(d_y), Expression::<B>(weight.scales));
    let [outputs] = scales.dims::<1>();
    let d_bias = bias_wanted.then(|| bias_gradient::<B>(d_y.clone().cast(DType::F32).0));
    let d_x = x_wanted.then(|| {
        let [numbers, row_scales] = scaled_rows(d_y.clone().cast(DType::F32) * scales.reshape([1, outputs]));
        numbers.cast(products).matmul(numbers_of::<B>(weight.codes, products)) * row_scales
    });
    let Some(SavedLora { x, lora, inner }) = lora else { return [d_x.map(|d| d.cast(products).0), d_bias, None, None] };
    let wanted = [x_wanted, down_wanted, up_wanted];
    let [d_x_of_lora, d_down, d_up] = low_rank_pull(Expression(x), lora, Expression(inner), d_y.cast(products), wanted);
    // Both parts exist if the gradient of x is wanted.
    let d_x = d_x.zip(d_x_of_lora).map(|(d_x, of_lora)| (d_x + of_lora).cast(products).0);
    [d_x, d_bias, d_down.map(|d| d.0), d_up.map(|d| d.0)]
}

/// The numbers that the codes represent, `[out, in]`, without the scales. They are exact in f32 and in bf16.
fn numbers_of<B: Fp8Kernel>(codes: IntTensor<B>, dtype: DType) -> Expression<B> {
    let [rows, _] = codes.shape().dims::<2>();
    let ones = B::float_ones(Shape::new([rows]), &codes.device(), FloatDType::F32);
    Expression(B::decoded(EightBits::E4m3, codes, ones, dtype))
}

/// Rounds the rows of x to e4m3: returns the rounded numbers and the scales `[rows, 1]`, both f32, whose product
/// approximates x. A row that is not finite gets at least one NaN.
fn scaled_rows<B: Fp8Kernel>(x: Expression<B>) -> [Expression<B>; 2] {
    let x = x.cast(DType::F32);
    // At least the smallest normal number, so that rows of zeros are not divided by zero.
    let scales = (x.clone().abs().max(1) / E4M3_MAX).clamp_min(f64::from(f32::MIN_POSITIVE));
    let numbers = Expression(B::to_e4m3((x / scales.clone()).0));
    [numbers, scales]
}

/// The largest number of e4m3.
const E4M3_MAX: f64 = 448.0;

/// See [`Fp8Kernel::to_e4m3`]. Cuts each magnitude at the powers of two into one part per binade, and rounds each part
/// to the spacing of its binade. Below the binade of the magnitude the parts are whole binades, above it they are zero.
/// Only the part of the binade itself is changed by rounding, and all other steps are exact, so that the sum is rounded
/// once.
fn nearest_e4m3<B: Backend>(x: Expression<B>) -> Expression<B> {
    let magnitude = x.clone().abs().clamp_abs(E4M3_MAX);
    // Rounds to the spacing of the binade that begins at 2^exponent: e4m3 has three bits of mantissa.
    let rounded = |part: Expression<B>, exponent: i32| {
        let spacing = f64::from(exponent - 3).exp2();
        (part * spacing.recip()).round() * spacing
    };
    // Subnormal numbers have the spacing of the first binade, which ends at 2^-5.
    let first_end = f64::from(-5).exp2();
    let first = rounded(magnitude.clone().clamp_abs(first_end), -6);
    // The other binades begin at 2^-5 to 2^8; the last contains 448.
    let sum = (-5..=8).fold(first, |sum, exponent| {
        let start = f64::from(exponent).exp2();
        let part = (magnitude.clone() + -start).clamp_min(0.0).clamp_abs(start);
        sum + rounded(part, exponent)
    });
    // Not every backend's clamp keeps NaN.
    let nan_or_zero = x.clone() * 0.0;
    sum * x.sign() + nan_or_zero
}
