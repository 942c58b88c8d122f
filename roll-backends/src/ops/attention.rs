//! Scaled dot-product attention.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Tensor};

use super::product::ProductKernel;
use super::record::{Cotangents, record_wanted};
use super::tiled;

/// How [`attention_with`] weighs values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionOptions {
    /// The factor of the products of queries and keys; `1 / sqrt(d)` unless given.
    pub scale: Option<f32>,
    /// Whether query `i` sees only the keys up to `i + Lk - Lq`, as a language model does.
    pub causal: bool,
    /// How many of those it sees, the last ones; all unless given. With `causal` alone.
    pub window: Option<usize>,
    /// Bound of the scores `s`: they become `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// The dtype that the operands are rounded to, if given. The result has the dtype of q.
    pub products: Option<DType>,
}

/// Scaled dot-product attention of `heads` heads, without mask: q `[Lq, heads * d]`, k and v `[Lk, heads * d]`,
/// result `[Lq, heads * d]`; scores are multiplied by `1 / sqrt(d)`. Never holds an `Lq x Lk` matrix. The operands have
/// one dtype, f32 or bf16, which the result has too; sums are f32.
pub fn attention(q: Tensor<2>, k: Tensor<2>, v: Tensor<2>, heads: usize) -> Tensor<2> {
    attention_with(q, k, v, heads, AttentionOptions::default())
}

/// As [`attention`], with a scale or a causal mask.
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
    let [q, k, v] = [q, k, v].map(|x| in_dtype(x, products).into_dispatch());
    let AttentionOptions { causal, window, softcap, .. } = options;
    assert!(causal || window.is_none(), "a window without a causal mask");
    let call = AttentionCall { heads, scale, causal, window, softcap };
    let out = Tensor::from_dispatch(<Dispatch as AttentionOps>::attention(q, k, v, call));
    in_dtype(out, dtype)
}

fn in_dtype(x: Tensor<2>, dtype: DType) -> Tensor<2> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

/// Attention as the run-time dispatch calls it. A backend implements [`AttentionKernel`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    LibTorch: cfg(feature = "libtorch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait AttentionOps: Backend {
    /// See [`attention_with`].
    fn attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: AttentionCall,
    ) -> FloatTensor<Self>;
}

/// Heads, scale and mask of one call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall {
    /// Heads, side by side in each row.
    pub heads: usize,
    /// The factor of the products of queries and keys.
    pub scale: f32,
    /// Whether later keys are hidden.
    pub causal: bool,
    /// How many keys a query sees at most, the last of those that are not hidden.
    pub window: Option<usize>,
    /// Bound of the scores: see [`AttentionOptions::softcap`].
    pub softcap: Option<f32>,
}

impl AttentionCall {
    /// Without window and bound, which not every kernel has.
    #[cfg(any(feature = "cube", feature = "libtorch"))]
    pub(super) fn is_plain(&self) -> bool {
        self.window.is_none() && self.softcap.is_none()
    }
}

/// The pullback of a recorded call: takes the cotangent of its result and which of the gradients of q, k and v are wanted.
pub type AttentionPull<B> = Box<dyn FnOnce(FloatTensor<B>, [bool; 3]) -> Cotangents<B, 3> + Send>;

/// Attention and its gradients on one backend.
pub trait AttentionKernel: ProductKernel {
    /// The result of a call whose gradients are wanted, those of q, k and v that `wanted` says, and its pullback, which
    /// owns its operands. A backend that keeps anything else than [`AttentionKernel::attention_forward`] returns does
    /// so here.
    fn attention_recorded(
        qkv: [FloatTensor<Self>; 3],
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> (FloatTensor<Self>, AttentionPull<Self>) {
        let _ = wanted;
        keeping_softmax::<Self>(qkv, call)
    }

    /// The result, and the facts of each row's softmax that the backward needs (in the backend's own layout; empty
    /// where the backward finds it out itself).
    fn attention_forward(qkv: [FloatTensor<Self>; 3], call: AttentionCall) -> (FloatTensor<Self>, FloatTensor<Self>) {
        tiled::forward::<Self>(qkv, call)
    }

    /// The wanted ones of the gradients of q, k and v.
    fn attention_backward(
        qkv: [FloatTensor<Self>; 3],
        out: FloatTensor<Self>,
        softmax: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        tiled::backward::<Self>(qkv, out, softmax, d_out, call, wanted)
    }
}

/// [`AttentionKernel::attention_recorded`] by the kernel's forward and backward.
pub(super) fn keeping_softmax<B: AttentionKernel>(
    qkv: [FloatTensor<B>; 3],
    call: AttentionCall,
) -> (FloatTensor<B>, AttentionPull<B>) {
    let (out, softmax) = B::attention_forward(qkv.clone(), call);
    let kept = out.clone();
    (out, Box::new(move |d_out, wanted| B::attention_backward(qkv, kept, softmax, d_out, call, wanted)))
}

impl<B: AttentionKernel> AttentionOps for B {
    fn attention(q: FloatTensor<B>, k: FloatTensor<B>, v: FloatTensor<B>, call: AttentionCall) -> FloatTensor<B> {
        B::attention_forward([q, k, v], call).0
    }
}

impl<B: AttentionKernel, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: AttentionCall,
    ) -> FloatTensor<Self> {
        record_wanted::<B, C, _, 3>([q, k, v], |qkv, wanted| {
            if wanted.contains(&true) {
                return B::attention_recorded(qkv, call, wanted);
            }
            let pull: AttentionPull<B> = Box::new(|_, _| [const { None }; 3]);
            (B::attention_forward(qkv, call).0, pull)
        })
    }
}
