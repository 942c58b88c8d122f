//! ATen's fused scaled dot-product attention, forward and backward: the matrix of all scores is never materialised, on
//! any device.

use std::collections::BTreeSet;
use std::sync::{Mutex, OnceLock};

use tch::{CModule, IValue, Tensor};

use super::fresh;
use crate::backend::{LibTorch, libtorch::TchTensor};
use crate::ops::{AttentionCall, AttentionKernel, Cotangents, tiled};
use crate::sync::lock;

impl AttentionKernel for LibTorch {
    fn attention_forward(qkv: [TchTensor; 3], call: AttentionCall) -> (TchTensor, TchTensor) {
        let Some(kernel) = fused_kernel(&qkv, call) else { return tiled::forward::<Self>(qkv, call) };
        let [out, statistics] = run(kernel, by_head(&qkv, call), call);
        (merge_heads(&out), fresh(statistics))
    }

    fn attention_backward(
        qkv: [TchTensor; 3],
        out: TchTensor,
        statistics: TchTensor,
        d_out: TchTensor,
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        let Some(kernel) = fused_kernel(&qkv, call) else {
            return tiled::backward::<Self>(qkv, out, statistics, d_out, call, wanted);
        };
        let [q, k, v] = by_head(&qkv, call);
        let [out, d_out] = [out, d_out].map(|x| split_heads(&x, call.heads));
        // The argument `none` of `attention.py`: passed to ATen for the optional inputs that are not used here (a bias,
        // the lengths of several sequences).
        let none = Tensor::new();
        // All three gradients. Gradients that are not wanted are dropped.
        let gradients: [Tensor; 3] =
            run(&format!("{kernel}_backward"), [d_out, q, k, v, out, statistics.tensor, none], call);
        let mut gradients = gradients.into_iter();
        wanted.map(|wanted| {
            let gradient = gradients.next()?;
            wanted.then(|| merge_heads(&gradient))
        })
    }
}

/// Multiple of channels per head that ATen's kernels for GPUs require.
const GPU_CHANNEL_MULTIPLE: i64 = 8;

/// The function of `attention.pt` that computes a call. `None` where ATen has no fused kernel. Its causal mask aligns
/// the first query with the first key, which is right only for as many queries as keys. It supports neither windows nor
/// soft caps. Its kernels for GPUs take heads of a multiple of [`GPU_CHANNEL_MULTIPLE`] channels.
fn fused_kernel(qkv: &[TchTensor; 3], call: AttentionCall) -> Option<&'static str> {
    let (queries, keys) = (qkv[0].tensor.size()[0], qkv[1].tensor.size()[0]);
    let channels = qkv[0].tensor.size()[1];
    if queries * keys * channels == 0 || !call.is_plain() || (call.causal && queries != keys) {
        return None;
    }
    if !qkv[0].tensor.device().is_cuda() {
        return Some("cpu");
    }
    let width = channels / call.heads as i64;
    let atens_choice = || {
        // ATen's choice depends on whether gradients are wanted. The kernel is always the one for calls with gradients.
        let [q, k, v] = by_head(qkv, call).map(|x| x.detach().set_requires_grad(true));
        let scale = f64::from(call.scale);
        let (no_mask, dropout, shares_key_heads) = (None::<Tensor>, 0.0, false);
        Tensor::f_internal_fused_sdp_choice(&q, &k, &v, no_mask, dropout, call.causal, scale, shares_key_heads).ok()
    };
    let choice = if width % GPU_CHANNEL_MULTIPLE == 0 { atens_choice() } else { None };
    // The numbers of ATen's `SDPBackend`.
    let kernel = match choice {
        Some(1) => Some("flash"),
        Some(2) => Some("efficient"),
        Some(3) => Some("cudnn"),
        _ => None,
    };
    log_kernel(&format!("{:?}, heads of {width} channels", qkv[0].tensor.kind()), kernel);
    kernel
}

/// Logs which kernel computes attention, once per kind of call, because the speed of a pass depends on it.
fn log_kernel(call_kind: &str, kernel: Option<&str>) {
    static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if lock(&LOGGED).insert(call_kind.into()) {
        let kernel = kernel.unwrap_or("blocks of plain products, as ATen has no fused kernel");
        tracing::info!("attention in {call_kind}: {kernel}");
    }
}

/// Runs the function `name` of `attention.pt`, whose source is `attention.py`. Panics with ATen's message if it fails.
fn run<const N: usize>(name: &str, tensors: impl IntoIterator<Item = Tensor>, call: AttentionCall) -> [Tensor; N] {
    static MODULE: OnceLock<CModule> = OnceLock::new();
    let module = MODULE.get_or_init(|| {
        let module = CModule::load_data(&mut include_bytes!("attention.pt").as_slice());
        module.unwrap_or_else(|error| panic!("attention.pt: {error}"))
    });
    let options = [IValue::Bool(call.causal), IValue::Double(f64::from(call.scale))];
    let arguments: Vec<IValue> = tensors.into_iter().map(IValue::Tensor).chain(options).collect();
    let found = match module.method_is(name, &arguments) {
        Ok(IValue::Tuple(found)) => found,
        other => panic!("attention, {name}: {other:?}"),
    };
    let tensors = found.into_iter().filter_map(|value| Tensor::try_from(value).ok()).collect::<Vec<_>>();
    tensors.try_into().unwrap_or_else(|_| panic!("attention, {name}: expected {N} tensors"))
}

/// [`split_heads`] of q, k and v.
fn by_head(qkv: &[TchTensor; 3], call: AttentionCall) -> [Tensor; 3] {
    [0, 1, 2].map(|i| split_heads(&qkv[i], call.heads))
}

/// Reshapes `[rows, heads * d]` to `[1, heads, rows, d]`. The kernels need contiguous rows; other tensors are copied.
fn split_heads(x: &TchTensor, heads: usize) -> Tensor {
    let [rows, channels] = [x.tensor.size()[0], x.tensor.size()[1]];
    x.tensor.contiguous().view([1, rows, heads as i64, channels / heads as i64]).transpose(1, 2)
}

/// Undoes [`split_heads`] for a new tensor. ATen's results already have rows outermost and are not copied.
fn merge_heads(x: &Tensor) -> TchTensor {
    let [heads, rows, width] = [x.size()[1], x.size()[2], x.size()[3]];
    fresh(x.transpose(1, 2).reshape([rows, heads * width]))
}
