//! Linear layers, with and without LoRA.

use burn_tensor::{DType, Tensor};

use super::Kernels;
use super::expression::Expression;
use super::operator::{Cotangents, Operator, Primitives, Pullback, call, with_backend};
use super::product::ProductKernel;
use crate::backend::{Backend, tensor::FloatTensor as Floats};

/// Returns `x W^T + b`: x `[L, in]`, weight `[out, in]` as checkpoints store it, bias `[out]`, result `[L, out]` in the
/// dtype of x, f32 or bf16. Panics if the shapes do not match.
///
/// The product is taken in the dtype of the weight, with f32 accumulation: for a bf16 weight, an f32 x is rounded to
/// bf16. On flex, x is rounded too but the product is f32, and the weight is converted piece by piece, which is exact.
pub fn linear(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let (bias, dtype) = (checked_bias(&x, weight.dims(), bias), x.dtype());
    let x = x.cast(weight.dtype());
    call(Linear { dtype }, [x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch()])
}

/// Returns `x W^T + b` as f32, for passes that are not differentiated. The product is taken in the dtype of x: for an
/// f32 x, a bf16 weight is converted, some outputs at a time. On flex, the result of a row has the same bits whatever
/// the other rows are, so that decoding a sequence alone or in a batch generates the same tokens.
pub fn linear_rows(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    check_shapes(&x, weight.dims(), bias.as_ref());
    let (operands, bias) = ([x.into_dispatch(), weight.into_dispatch()], bias.map(Tensor::into_dispatch));
    with_backend!(operands[0], B => {
        let [x, weight] = operands.map(B::constant);
        B::tensor(B::rows_forward(x, weight, bias.map(B::constant)))
    })
}

/// Returns `x W^T + b + scale * (x A^T) B^T`, as [`linear`] does, with down = A `[rank, in]`, up = B `[out, rank]` and
/// scale = alpha / rank. LoRA is added to the result, never merged into the weight.
pub fn linear_lora(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    down: Tensor<2>,
    up: Tensor<2>,
    scale: f64,
) -> Tensor<2> {
    let (bias, dtype) = (checked_bias(&x, weight.dims(), bias), x.dtype());
    check_lora(weight.dims(), &down, &up);
    let [x, weight, down, up] = [x.cast(weight.dtype()), weight, down, up].map(Tensor::into_dispatch);
    call(LinearLora { scale: scale as f32, dtype }, [x, weight, bias.into_dispatch(), down, up])
}

/// Returns the bias, by default zeros, for a weight of `shape`. Panics if the shapes do not match.
pub(super) fn checked_bias(x: &Tensor<2>, shape: [usize; 2], bias: Option<Tensor<1>>) -> Tensor<1> {
    check_shapes(x, shape, bias.as_ref());
    bias.unwrap_or_else(|| Tensor::zeros([shape[0]], (&x.device().without_autodiff(), DType::F32)))
}

/// Panics if x and the bias do not belong to a weight of `shape`.
fn check_shapes(x: &Tensor<2>, shape: [usize; 2], bias: Option<&Tensor<1>>) {
    let [outputs, inputs] = shape;
    assert_eq!(x.dims()[1], inputs, "columns of x for a weight of {shape:?}");
    if let Some(bias) = bias {
        assert_eq!(bias.dims(), [outputs], "the bias for a weight of {shape:?}");
    }
}

/// Panics if the LoRA matrices do not belong to a weight of `shape`.
pub(super) fn check_lora(shape: [usize; 2], down: &Tensor<2>, up: &Tensor<2>) {
    let ([outputs, inputs], [down, up]) = (shape, [down.dims(), up.dims()]);
    let rank = down[0];
    assert!(
        down == [rank, inputs] && up == [outputs, rank],
        "a low-rank part of {down:?} and {up:?} for a weight of {shape:?}"
    );
}

/// The gradient `[outputs]` of a bias that is added to each row, given the cotangent of the result.
pub(super) fn bias_gradient<B: Backend>(d_y: Floats<B>) -> Floats<B> {
    let d_y = Expression::<B>(d_y);
    let [_, outputs] = d_y.dims::<2>();
    d_y.sum(0).reshape([outputs]).0
}

/// Returns LoRA's part of a result, `scale * (x A^T) B^T` in f32, and `x A^T` in the dtype of x, in which the products
/// are taken.
pub(super) fn low_rank<B: ProductKernel>(
    x: Expression<B>,
    Lora { down, up, scale }: Lora<Floats<B>>,
) -> (Expression<B>, Expression<B>) {
    let dtype = x.dtype();
    let inner = x.matmul(Expression(down).cast(dtype).t()).cast(dtype);
    let product = inner.clone().matmul(Expression(up).cast(dtype).t());
    (product * f64::from(scale), inner)
}

/// The gradients of x, A and B through [`low_rank`] that are wanted, in f32. x, `inner` (`x A^T`) and the cotangent
/// `d_y` have the dtype in which the products are taken.
pub(super) fn low_rank_pull<B: ProductKernel>(
    x: Expression<B>,
    Lora { down, up, scale }: Lora<Floats<B>>,
    inner: Expression<B>,
    d_y: Expression<B>,
    [x_wanted, down_wanted, up_wanted]: [bool; 3],
) -> [Option<Expression<B>>; 3] {
    let (dtype, scale) = (x.dtype(), f64::from(scale));
    let (mut d_x, mut d_down) = (None, None);
    if x_wanted || down_wanted {
        let d_inner = (d_y.clone().matmul(Expression(up).cast(dtype)) * scale).cast(dtype);
        d_x = x_wanted.then(|| d_inner.clone().matmul(Expression(down).cast(dtype)));
        d_down = down_wanted.then(|| d_inner.t().matmul(x));
    }
    let d_up = up_wanted.then(|| d_y.t().matmul(inner) * scale);
    [d_x, d_down, d_up]
}

/// See [`linear`]; the operands are x, weight and bias.
struct Linear {
    /// The dtype of the result.
    dtype: DType,
}

impl Operator<3> for Linear {
    fn record<B: Kernels>(
        self,
        [x, weight, bias]: [Floats<B>; 3],
        [x_wanted, weight_wanted, bias_wanted]: [bool; 3],
    ) -> (Floats<B>, impl Pullback<B, 3>) {
        let no_lora = None;
        let (y, _) = B::linear_forward_as(x.clone(), weight.clone(), bias, no_lora, self.dtype);
        (y, move |d_y| {
            let saved = SavedLinear { x, weight, lora: None };
            let wanted = [x_wanted, weight_wanted, bias_wanted, false, false];
            let [d_x, d_weight, d_bias, ..] = B::linear_backward(saved, d_y, wanted);
            [d_x, d_weight, d_bias]
        })
    }
}

/// See [`linear_lora`]; the operands are x, weight, bias, down and up.
struct LinearLora {
    scale: f32,
    /// The dtype of the result.
    dtype: DType,
}

impl Operator<5> for LinearLora {
    fn record<B: Kernels>(
        self,
        [x, weight, bias, down, up]: [Floats<B>; 5],
        wanted: [bool; 5],
    ) -> (Floats<B>, impl Pullback<B, 5>) {
        let lora = Lora { down, up, scale: self.scale };
        let (y, inner) = B::linear_forward_as(x.clone(), weight.clone(), bias, Some(lora.clone()), self.dtype);
        let saved = SavedLinear { x, weight, lora: inner.map(|inner| (lora, inner)) };
        (y, move |d_y| B::linear_backward(saved, d_y, wanted))
    }
}

/// The LoRA matrices of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Lora<T> {
    /// A (down projection), `[rank, in]`.
    pub down: T,
    /// B (up projection), `[out, rank]`.
    pub up: T,
    /// Factor, alpha / rank.
    pub scale: f32,
}

impl<T> Lora<T> {
    /// Converts both matrices.
    pub fn map<U>(self, convert: impl Fn(T) -> U) -> Lora<U> {
        Lora { down: convert(self.down), up: convert(self.up), scale: self.scale }
    }

    /// Borrows both matrices.
    pub fn as_ref(&self) -> Lora<&T> {
        Lora { down: &self.down, up: &self.up, scale: self.scale }
    }
}

/// Linear layers and their gradients on one backend. x and weight have one dtype, except in
/// [`LinearKernel::rows_forward`]. The gradient of x has the dtype of x, and the cotangent of the result has the dtype
/// of the result; everything else is f32.
pub trait LinearKernel: ProductKernel {
    /// Returns the result in `dtype` and, with LoRA, `x A^T` (in a dtype of the backend's choice).
    fn linear_forward_as(
        x: Floats<Self>,
        weight: Floats<Self>,
        bias: Floats<Self>,
        lora: Option<Lora<Floats<Self>>>,
        dtype: DType,
    ) -> (Floats<Self>, Option<Floats<Self>>) {
        let (y, inner) = Self::linear_forward(x, weight, bias, lora);
        (Expression::<Self>(y).cast(dtype).0, inner)
    }

    /// Returns the result of [`LinearKernel::linear_forward_as`] in f32.
    fn linear_forward(
        x: Floats<Self>,
        weight: Floats<Self>,
        bias: Floats<Self>,
        lora: Option<Lora<Floats<Self>>>,
    ) -> (Floats<Self>, Option<Floats<Self>>) {
        let (x, weight, bias) = (Expression::<Self>(x), Expression(weight), Expression(bias));
        let [outputs, _] = weight.dims::<2>();
        let y = x.clone().matmul(weight.t()) + bias.reshape([1, outputs]);
        let Some(lora) = lora else { return (y.0, None) };
        let (lora_part, inner) = low_rank(x, lora);
        ((y + lora_part).0, Some(inner.0))
    }

    /// See [`linear_rows`].
    fn rows_forward(x: Floats<Self>, weight: Floats<Self>, bias: Option<Floats<Self>>) -> Floats<Self> {
        let (x, weight, bias) = (Expression::<Self>(x), Expression::<Self>(weight), bias.map(Expression::<Self>));
        let dtype = x.dtype();
        // Without a bias, no zeros are made and added.
        let product = |weight: Expression<Self>, bias: Option<Expression<Self>>| match bias {
            Some(bias) => Expression::<Self>(Self::linear_forward(x.0.clone(), weight.0, bias.0, None).0),
            None => x.clone().matmul(weight.t()),
        };
        if dtype == weight.dtype() {
            return product(weight, bias).0;
        }
        let [outputs, _] = weight.dims::<2>();
        let parts = (0..outputs).step_by(CAST_OUTPUTS).map(|first| {
            let part = first..(first + CAST_OUTPUTS).min(outputs);
            let weight = weight.clone().narrow(0, part.clone()).cast(dtype);
            product(weight, bias.clone().map(|bias| bias.narrow(0, part)))
        });
        Expression::<Self>::cat(parts.collect(), 1).0
    }

    /// Returns the gradients of x, weight, bias, down and up that are `wanted`.
    fn linear_backward(saved: SavedLinear<Floats<Self>>, d_y: Floats<Self>, wanted: [bool; 5]) -> Cotangents<Self, 5> {
        let [x_wanted, weight_wanted, bias_wanted, down_wanted, up_wanted] = wanted;
        let (x, weight, d_y) = (Expression::<Self>(saved.x), Expression::<Self>(saved.weight), Expression(d_y));
        let dtype = weight.dtype();
        let d_bias = bias_wanted.then(|| bias_gradient::<Self>(d_y.clone().cast(DType::F32).0));
        let d_y = d_y.cast(dtype);
        let d_weight = weight_wanted.then(|| d_y.clone().t().matmul(x.clone()).0);
        let d_x = x_wanted.then(|| d_y.clone().matmul(weight));
        let Some((lora, inner)) = saved.lora else {
            return [d_x.map(|d| d.cast(dtype).0), d_weight, d_bias, None, None];
        };
        let lora_wanted = [x_wanted, down_wanted, up_wanted];
        let [d_x_of_lora, d_down, d_up] = low_rank_pull(x, lora, Expression(inner), d_y, lora_wanted);
        // Both parts exist if the gradient of x is wanted.
        let d_x = d_x.zip(d_x_of_lora).map(|(d_x, of_lora)| (d_x + of_lora).cast(dtype).0);
        let [d_down, d_up] = [d_down, d_up].map(|d| d.map(|d| d.0));
        [d_x, d_weight, d_bias, d_down, d_up]
    }
}

/// Number of outputs whose weights are converted to another dtype at a time.
const CAST_OUTPUTS: usize = 1 << 13;

/// The values of the forward pass that the backward pass needs.
#[derive(Clone, Debug)]
pub struct SavedLinear<T> {
    pub x: T,
    /// The weight, `[out, in]`.
    pub weight: T,
    /// The LoRA matrices and `x A^T`.
    pub lora: Option<(Lora<T>, T)>,
}
