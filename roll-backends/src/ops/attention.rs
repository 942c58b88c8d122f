//! Scaled dot-product attention.

pub mod tiled;

use std::any::Any;
use std::sync::{Arc, Mutex};

use burn_tensor::{DType, Tensor};

use super::Kernels;
use super::operator::{Cotangents, Operator, Pullback, call};
use super::product::ProductKernel;
use crate::backend::tensor::FloatTensor as Floats;
use crate::sync::lock;

/// Options of [`attention_with`].
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// Factor of the scores; `1 / sqrt(d)` by default.
    pub scale: Option<f32>,
    /// Whether query `i` attends only to keys up to `i + Lk - Lq` (causal mask, aligned at the end).
    pub causal: bool,
    /// Sliding window: the number of latest keys, among those the causal mask leaves, that a query attends to.
    /// Unlimited by default; requires `causal`.
    pub window: Option<usize>,
    /// Soft cap of the scores: a score `s` becomes `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// The dtype that q, k and v are rounded to before the products; by default they are not rounded. The result has
    /// the dtype of q.
    pub products: Option<DType>,
    /// Storage of the result between a forward pass and its recomputation; none by default.
    pub kept: Option<KeptAttention>,
}

/// Result and softmax statistics of a call, kept between the forward pass of a checkpointed segment and its
/// recomputation. The forward pass, which is not recorded for autodiff, stores them. The recomputation, which is
/// recorded and has the same operands, takes them and computes only gradients.
#[derive(Clone, Debug, Default)]
pub struct KeptAttention(Arc<Mutex<Option<Box<dyn Any + Send>>>>);

impl KeptAttention {
    fn store<B: Kernels>(&self, out: Floats<B>, statistics: Floats<B>) {
        *lock(&self.0) = Some(Box::new((out, statistics)));
    }

    fn take<B: Kernels>(&self) -> Option<(Floats<B>, Floats<B>)> {
        lock(&self.0).take()?.downcast().ok().map(|kept| *kept)
    }
}

/// Scaled dot-product attention with `heads` heads and without mask. Shapes: q `[Lq, heads * d]`, k and v
/// `[Lk, heads * d]`, result `[Lq, heads * d]`. Scores are multiplied by `1 / sqrt(d)`. An `Lq x Lk` matrix is never
/// materialised. Operands and result have one dtype, f32 or bf16; accumulation is f32.
pub fn attention(q: Tensor<2>, k: Tensor<2>, v: Tensor<2>, heads: usize) -> Tensor<2> {
    attention_with(q, k, v, heads, AttentionOptions::default())
}

/// [`attention`] with the scale, mask and soft cap of `options`. Panics if the shapes do not match or a window is given
/// without `causal`.
pub fn attention_with(q: Tensor<2>, k: Tensor<2>, v: Tensor<2>, heads: usize, options: AttentionOptions) -> Tensor<2> {
    let ([_, channels], [keys, k_channels]) = (q.dims(), k.dims());
    assert!(
        heads > 0 && channels.is_multiple_of(heads) && k_channels == channels && v.dims() == [keys, channels],
        "attention of {heads} heads over q {:?}, k {:?}, v {:?}",
        q.dims(),
        k.dims(),
        v.dims()
    );
    let scale = options.scale.unwrap_or_else(|| (1.0 / ((channels / heads) as f64).sqrt()) as f32);
    let dtype = q.dtype();
    let products = options.products.unwrap_or(dtype);
    let qkv = [q, k, v].map(|x| x.cast(products).into_dispatch());
    let AttentionOptions { causal, window, softcap, .. } = options;
    assert!(causal || window.is_none(), "a window without a causal mask");
    let attention = AttentionCall { heads, scale, causal, window, softcap };
    match options.kept {
        Some(kept) => call(KeptCall { attention, kept }, qkv),
        None => call(attention, qkv),
    }
    .cast(dtype)
}

/// A call whose result is kept for its recomputation; the operands are q, k and v.
struct KeptCall {
    attention: AttentionCall,
    kept: KeptAttention,
}

impl Operator<3> for KeptCall {
    fn forward<B: Kernels>(self, qkv: [Floats<B>; 3]) -> Floats<B> {
        let (out, statistics) = B::attention_forward(qkv, self.attention);
        self.kept.store::<B>(out.clone(), statistics);
        out
    }

    fn record<B: Kernels>(self, qkv: [Floats<B>; 3], wanted: [bool; 3]) -> (Floats<B>, impl Pullback<B, 3>) {
        let Self { attention, kept } = self;
        let forward = kept.take::<B>().unwrap_or_else(|| B::attention_forward(qkv.clone(), attention));
        with_pullback::<B>(forward, qkv, attention, wanted)
    }
}

/// One call of [`attention_with`]; the operands are q, k and v. [`AttentionOptions`] documents the fields.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall {
    /// Number of heads, which lie side by side in each row.
    pub heads: usize,
    pub scale: f32,
    pub causal: bool,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
}

impl AttentionCall {
    /// Whether the call has neither a window nor a soft cap; some kernels support neither.
    #[cfg(any(feature = "cube", feature = "libtorch"))]
    pub(super) fn is_plain(&self) -> bool {
        self.window.is_none() && self.softcap.is_none()
    }
}

impl Operator<3> for AttentionCall {
    fn forward<B: Kernels>(self, qkv: [Floats<B>; 3]) -> Floats<B> {
        let (out, _) = B::attention_forward(qkv, self);
        out
    }

    fn record<B: Kernels>(self, qkv: [Floats<B>; 3], wanted: [bool; 3]) -> (Floats<B>, impl Pullback<B, 3>) {
        let forward = B::attention_forward(qkv.clone(), self);
        with_pullback::<B>(forward, qkv, self, wanted)
    }
}

/// Attention and its gradients on one backend.
pub trait AttentionKernel: ProductKernel {
    /// Returns the result and the statistics of each row's softmax for the backward pass, in a layout of the backend
    /// (empty if the backward pass recomputes them).
    fn attention_forward(qkv: [Floats<Self>; 3], call: AttentionCall) -> (Floats<Self>, Floats<Self>) {
        tiled::forward::<Self>(qkv, call)
    }

    /// The gradients of q, k and v that are `wanted`, given the results of the forward pass.
    fn attention_backward(
        qkv: [Floats<Self>; 3],
        out: Floats<Self>,
        statistics: Floats<Self>,
        d_out: Floats<Self>,
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        tiled::backward::<Self>(qkv, out, statistics, d_out, call, wanted)
    }
}

/// Returns the result of a forward pass, and its pullback, which owns operands, result and softmax statistics.
fn with_pullback<B: AttentionKernel>(
    (out, statistics): (Floats<B>, Floats<B>),
    qkv: [Floats<B>; 3],
    call: AttentionCall,
    wanted: [bool; 3],
) -> (Floats<B>, impl Pullback<B, 3>) {
    let saved = out.clone();
    (out, move |d_out| B::attention_backward(qkv, saved, statistics, d_out, call, wanted))
}
