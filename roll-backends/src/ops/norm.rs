//! Layer norm, and the kernel that RMS norm shares with it.

use burn_tensor::{DType, Tensor};

use super::Kernels;
use super::by_group::ByGroup;
use super::expression::{Expression, sum_if_shared};
use super::operator::{Cotangents, Operator, Pullback, call};
use crate::backend::{Backend, TensorMetadata, tensor::FloatTensor as Floats};

/// Layer norm over the last axis of `[L, D]`: `(x - mean) / sqrt(var + eps) * gain + shift`; gain and shift are
/// `[1, D]` or `[L, D]`. All tensors are f32.
pub fn layer_norm(x: Tensor<2>, gain: Tensor<2>, shift: Tensor<2>, eps: f64) -> Tensor<2> {
    layer_norm_as(x, gain, shift, eps, DType::F32)
}

/// Layer norm as [`layer_norm`], computed in f32 and rounded once to `dtype`, f32 or bf16.
pub fn layer_norm_as(x: Tensor<2>, gain: Tensor<2>, shift: Tensor<2>, eps: f64, dtype: DType) -> Tensor<2> {
    assert_row_operand("the gain of a layer norm", &gain, &x);
    assert_row_operand("the shift of a layer norm", &shift, &x);
    call(LayerNorm { eps, dtype }, [x, gain, shift].map(Tensor::into_dispatch))
}

/// [`layer_norm_as`] with one row of gain and shift, `[G, D]`, for each of G groups of rows, which have the sizes
/// `groups`.
pub fn layer_norm_groups(
    x: Tensor<2>,
    gain: Tensor<2>,
    shift: Tensor<2>,
    groups: &[usize],
    eps: f64,
    dtype: DType,
) -> Tensor<2> {
    if groups.len() < 2 {
        return layer_norm_as(x, gain, shift, eps, dtype);
    }
    assert_group_operand("the gain of a layer norm", &gain, &x, groups);
    assert_group_operand("the shift of a layer norm", &shift, &x, groups);
    let operator = LayerNorm { eps, dtype };
    let by_group = ByGroup { operator, groups: groups.to_vec(), grouped: [false, true, true] };
    call(by_group, [x, gain, shift].map(Tensor::into_dispatch))
}

/// Panics unless `operand` has the width of `x`, and one row or the same number of rows.
pub(super) fn assert_row_operand(what: &str, operand: &Tensor<2>, x: &Tensor<2>) {
    let ([rows, width], found) = (x.dims(), operand.dims());
    assert!(
        found[1] == width && (found[0] == 1 || found[0] == rows),
        "{what}: expected [1, {width}] or [{rows}, {width}], found {found:?}"
    );
}

/// Panics unless `operand` has the width of `x` and a row for each of `groups`, whose sizes add up to the rows of `x`.
pub(super) fn assert_group_operand(what: &str, operand: &Tensor<2>, x: &Tensor<2>, groups: &[usize]) {
    let ([rows, width], found) = (x.dims(), operand.dims());
    assert!(
        found == [groups.len(), width] && groups.iter().sum::<usize>() == rows,
        "{what}: expected [{}, {width}] for groups of {rows} rows, found {found:?} for {groups:?}",
        groups.len()
    );
}

/// See [`layer_norm_as`]; the operands are x, gain and shift.
#[derive(Clone)]
struct LayerNorm {
    eps: f64,
    dtype: DType,
}

impl Operator<3> for LayerNorm {
    fn record<B: Kernels>(
        self,
        [x, gain, shift]: [Floats<B>; 3],
        wanted: [bool; 3],
    ) -> (Floats<B>, impl Pullback<B, 3>) {
        let shared_shift = Some(SharedShift(shift.shape()[0] == 1));
        let (y, moments) = B::layer_norm_forward(x.clone(), gain.clone(), shift, self.eps, self.dtype);
        let saved = SavedNorm { x, gain, moments, shift: shared_shift, eps: self.eps };
        (y, move |d_y| B::layer_norm_backward(saved, d_y, wanted))
    }
}

/// The norms and their gradients on one backend. A norm with a shift is a layer norm, one without an RMS norm.
/// Everything is f32 unless stated otherwise.
pub trait NormKernel: Backend {
    /// Returns the result, and mean and inverse deviation of each row (in a layout of the backend).
    fn norm_forward(
        x: Floats<Self>,
        gain: Floats<Self>,
        shift: Option<Floats<Self>>,
        eps: f64,
    ) -> (Floats<Self>, Floats<Self>) {
        let (x, gain) = (Expression::<Self>(x), Expression(gain));
        let is_layer_norm = shift.is_some();
        let mean = is_layer_norm.then(|| x.clone().mean(1));
        let x = match mean.clone() {
            Some(mean) => x - mean,
            None => x,
        };
        let inverse = (x.clone().squared().mean(1) + eps).sqrt().recip();
        let y = x * inverse.clone() * gain;
        let y = match shift {
            Some(shift) => y + Expression(shift),
            None => y,
        };
        let moments = Expression::cat(mean.into_iter().chain([inverse]).collect(), 1);
        (y.0, moments.0)
    }

    /// Returns the gradients of x, gain and shift that are `wanted`, each in the shape of its operand.
    fn norm_backward(saved: SavedNorm<Floats<Self>>, d_y: Floats<Self>, wanted: [bool; 3]) -> Cotangents<Self, 3> {
        composed_backward::<Self>(saved, d_y, wanted)
    }

    /// [`NormKernel::norm_forward`] for a layer norm, with the result in `dtype`.
    fn layer_norm_forward(
        x: Floats<Self>,
        gain: Floats<Self>,
        shift: Floats<Self>,
        eps: f64,
        dtype: DType,
    ) -> (Floats<Self>, Floats<Self>) {
        let (y, moments) = Self::norm_forward(x, gain, Some(shift), eps);
        (Expression::<Self>(y).cast(dtype).0, moments)
    }

    /// [`NormKernel::norm_backward`] for a layer norm, with the cotangent in the dtype of the result.
    fn layer_norm_backward(
        saved: SavedNorm<Floats<Self>>,
        d_y: Floats<Self>,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        Self::norm_backward(saved, Expression::<Self>(d_y).cast(DType::F32).0, wanted)
    }
}

/// [`NormKernel::norm_backward`] composed of primitive operations. The moments of a layer norm are `[L, 2]`, mean and
/// inverse deviation; those of an RMS norm are `[L, 1]`, the inverse deviation.
pub(super) fn composed_backward<B: NormKernel>(
    saved: SavedNorm<Floats<B>>,
    d_y: Floats<B>,
    [x_wanted, gain_wanted, shift_wanted]: [bool; 3],
) -> Cotangents<B, 3> {
    let (x, gain, moments) = (Expression::<B>(saved.x), Expression(saved.gain), Expression(saved.moments));
    let d_y = Expression(d_y);
    let [_, columns]: [usize; 2] = moments.dims();
    let inverse = moments.clone().narrow(1, columns - 1..columns);
    let x = match saved.shift {
        Some(_) => x - moments.narrow(1, 0..1),
        None => x,
    };
    let normed = x * inverse.clone();
    let is_gain_shared = gain.dims::<2>()[0] == 1;
    let d_gain = gain_wanted.then(|| sum_if_shared(normed.clone() * d_y.clone(), is_gain_shared).0);
    let d_shift = match saved.shift {
        Some(SharedShift(is_shift_shared)) if shift_wanted => Some(sum_if_shared(d_y.clone(), is_shift_shared).0),
        _ => None,
    };
    let d_x = x_wanted.then(|| {
        let d_normed = d_y * gain;
        let projection = (normed.clone() * d_normed.clone()).mean(1);
        let centered = match saved.shift {
            Some(_) => d_normed.clone() - d_normed.mean(1),
            None => d_normed,
        };
        ((centered - normed * projection) * inverse).0
    });
    [d_x, d_gain, d_shift]
}

/// The values of the forward pass that the backward pass needs.
#[derive(Clone, Debug)]
pub struct SavedNorm<T> {
    pub x: T,
    /// The gain, `[1, D]` or `[L, D]`.
    pub gain: T,
    /// Mean and inverse deviation of each row, in a layout of the backend.
    pub moments: T,
    /// Whether the shift of a layer norm has one row; `None` for an RMS norm.
    pub shift: Option<SharedShift>,
    /// Epsilon; only libtorch reads it.
    #[cfg_attr(not(feature = "libtorch"), allow(dead_code))]
    pub eps: f64,
}

/// Whether the shift of a layer norm is `[1, D]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedShift(pub bool);
