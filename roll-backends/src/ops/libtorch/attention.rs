//! ATen's fused scaled dot-product attention, forward and backward: the matrix of all scores is never materialised, on
//! any device.

use std::collections::BTreeSet;
use std::sync::Mutex;

use burn::backend::{LibTorch, libtorch::TchTensor};
use tch::Tensor;

use super::{fresh, pulled};
use crate::ops::attention::{AttentionPullback, save_softmax};
use crate::ops::{AttentionCall, AttentionKernel, Cotangents, tiled};
use crate::sync::lock;

impl AttentionKernel for LibTorch {
    fn attention_recorded(
        qkv: [TchTensor; 3],
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> (TchTensor, AttentionPullback<Self>) {
        if AttentionPath::of(&qkv, call) != AttentionPath::Fused {
            return save_softmax::<Self>(qkv, call, wanted);
        }
        let (out, graph) = Graph::of(qkv, call, wanted);
        (out, Box::new(move |d_out| graph.pull(&d_out, wanted)))
    }

    fn attention_forward(qkv: [TchTensor; 3], call: AttentionCall) -> (TchTensor, TchTensor) {
        let [q, k, v] = match AttentionPath::of(&qkv, call) {
            AttentionPath::Tiled => return tiled::forward::<Self>(qkv, call),
            AttentionPath::Flash => by_head(&qkv, call),
            AttentionPath::Fused => {
                let [q, k, v] = by_head(&qkv, call);
                // ATen keeps its softmax statistics internally.
                let none = Tensor::empty([0], (q.kind(), q.device()));
                return (merge_heads(&fused([&q, &k, &v], call)), fresh(none));
            }
        };
        let (out, log_sums) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
            &q,
            &k,
            &v,
            0.0,
            call.causal,
            None::<Tensor>,
            f64::from(call.scale),
        );
        (merge_heads(&out), fresh(log_sums))
    }

    fn attention_backward(
        qkv: [TchTensor; 3],
        out: TchTensor,
        softmax: TchTensor,
        d_out: TchTensor,
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        match AttentionPath::of(&qkv, call) {
            AttentionPath::Tiled => return tiled::backward::<Self>(qkv, out, softmax, d_out, call, wanted),
            // The call was not recorded, so it is recorded (and recomputed) here.
            AttentionPath::Fused => return Graph::of(qkv, call, wanted).1.pull(&d_out, wanted),
            AttentionPath::Flash => {}
        }
        let [q, k, v] = by_head(&qkv, call);
        let [out, d_out] = [out, d_out].map(|x| split_heads(&x, call.heads));
        let (dq, dk, dv) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
            &d_out,
            &q,
            &k,
            &v,
            &out,
            &softmax.tensor,
            0.0,
            call.causal,
            None::<Tensor>,
            f64::from(call.scale),
        );
        let mut gradients = [dq, dk, dv].into_iter();
        wanted.map(|wanted| gradients.next().filter(|_| wanted).map(|d| merge_heads(&d)))
    }
}

/// The kernel that computes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttentionPath {
    /// ATen's flash kernel for the CPU, whose backward pass takes the statistics of its forward pass.
    Flash,
    /// A fused kernel that ATen selects for the device. The bindings lack a forward function that returns what the
    /// backward functions take, so a recorded call is recorded by ATen's autograd: see [`Graph`].
    Fused,
    /// The project's blockwise attention. Used where ATen's causal mask differs (ATen aligns the first query with the
    /// first key), with a window or soft cap, and for empty calls.
    Tiled,
}

impl AttentionPath {
    fn of([q, k, _]: &[TchTensor; 3], call: AttentionCall) -> Self {
        let (queries, keys) = (q.tensor.size()[0], k.tensor.size()[0]);
        match () {
            () if queries * keys * q.tensor.size()[1] == 0 || !call.is_plain() => Self::Tiled,
            () if call.causal && queries != keys => Self::Tiled,
            () if q.tensor.device() == tch::Device::Cpu => Self::Flash,
            () => Self::Fused,
        }
    }
}

/// A call recorded by ATen's autograd, with the tensors that its kernel saved for the backward pass, so that the
/// forward pass is not recomputed. ATen frees the saved tensors in the backward pass, and everything with the graph.
struct Graph {
    /// q, k and v, `[1, heads, rows, d]`. Those whose gradients may be wanted require gradients.
    leaves: [Tensor; 3],
    /// The result, `[1, heads, rows, d]`.
    out: Tensor,
    /// Handles on the memory of leaves and result: while they are held, Burn does not write into it.
    _held: [TchTensor; 4],
}

impl Graph {
    /// Runs and records a call; returns the result and the graph.
    fn of(qkv: [TchTensor; 3], call: AttentionCall, wanted: [bool; 3]) -> (TchTensor, Self) {
        let mut wanted = wanted.into_iter();
        let leaves = by_head(&qkv, call).map(|x| x.detach().set_requires_grad(wanted.next().unwrap_or(false)));
        let [q, k, v] = &leaves;
        let out = tch::with_grad(|| fused([q, k, v], call));
        let result = merge_heads(&out.detach());
        let [q, k, v] = qkv;
        (result.clone(), Self { leaves, out, _held: [q, k, v, result] })
    }

    /// Returns the gradients of q, k and v that are `wanted`.
    fn pull(self, d_out: &TchTensor, wanted: [bool; 3]) -> Cotangents<LibTorch, 3> {
        let heads = self.out.size()[1] as usize;
        let leaves: Vec<&Tensor> =
            self.leaves.iter().zip(wanted).filter(|(_, wanted)| *wanted).map(|(x, _)| x).collect();
        // Rows outermost, which is the memory layout.
        let [y, d_y] = [&self.out, &split_heads(d_out, heads)].map(|x| tch::with_grad(|| x.transpose(1, 2)));
        let mut gradients = pulled(&y, &d_y, &leaves).into_iter();
        wanted.map(|wanted| if wanted { gradients.next().map(|d| merge_heads(&d)) } else { None })
    }
}

fn fused([q, k, v]: [&Tensor; 3], call: AttentionCall) -> Tensor {
    if q.device().is_cuda() {
        log_kernel([q, k, v], call);
    }
    let scale = f64::from(call.scale);
    Tensor::scaled_dot_product_attention(q, k, v, None::<Tensor>, 0.0, call.causal, scale, false)
}

/// Logs the kernel that ATen selects, once per kind of call, because the speed of a pass depends on it.
fn log_kernel([q, k, v]: [&Tensor; 3], call: AttentionCall) {
    static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let recorded = if [q, k, v].iter().any(|x| x.requires_grad()) { ", recorded" } else { "" };
    let call_kind = format!("{:?}, heads of {} channels{recorded}", q.kind(), q.size()[3]);
    if !lock(&LOGGED).insert(call_kind.clone()) {
        return;
    }
    let scale = f64::from(call.scale);
    let choice = Tensor::f_internal_fused_sdp_choice(q, k, v, None::<Tensor>, 0.0, call.causal, scale, false);
    let kernel = match choice {
        Ok(0) => "plain products, which hold the scores of all queries and keys at once",
        Ok(1) => "FlashAttention",
        Ok(2) => "the memory-efficient kernel",
        Ok(3) => "cuDNN",
        _ => "a kernel that it does not name",
    };
    match choice {
        Ok(0) => tracing::warn!("attention in {call_kind}: ATen takes {kernel}"),
        _ => tracing::info!("attention in {call_kind}: ATen takes {kernel}"),
    }
}

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

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    fn normal(rows: i64, kind: Kind) -> TchTensor {
        fresh(Tensor::randn([rows, 24], (Kind::Float, tch::Device::Cpu)).to_kind(kind))
    }

    fn distance(a: &TchTensor, b: &TchTensor) -> f64 {
        let [a, b] = [a, b].map(|x| x.tensor.to_kind(Kind::Double));
        f64::try_from((a - &b).abs().max() / b.abs().max()).unwrap()
    }

    fn calls() -> impl Iterator<Item = (AttentionCall, i64)> {
        let call = |causal| AttentionCall { heads: 3, scale: 0.3, causal, window: None, softcap: None };
        [(call(false), 33), (call(true), 40)].into_iter()
    }

    /// Runs the code path of GPUs on the CPU and compares it with the CPU's kernel.
    #[test]
    fn recorded_gradients_match_the_flash_kernel() {
        for ((call, keys), (kind, tolerance)) in
            calls().flat_map(|call| [(Kind::Float, 2e-6), (Kind::BFloat16, 2e-2)].map(|kind| (call, kind)))
        {
            let qkv = [normal(40, kind), normal(keys, kind), normal(keys, kind)];
            let d_out = normal(40, kind);
            let (out, softmax) = LibTorch::attention_forward(qkv.clone(), call);
            let expected =
                LibTorch::attention_backward(qkv.clone(), out.clone(), softmax, d_out.clone(), call, [true; 3]);
            for subset in 1..8 {
                let wanted = [0, 1, 2].map(|i| subset >> i & 1 == 1);
                let (result, graph) = Graph::of(qkv.clone(), call, wanted);
                assert_eq!(result.tensor.kind(), kind);
                assert!(!result.tensor.requires_grad() && distance(&result, &out) < tolerance);
                let gradients = graph.pull(&d_out, wanted);
                for ((gradient, expected), wanted) in gradients.into_iter().zip(&expected).zip(wanted) {
                    assert_eq!(gradient.is_some(), wanted);
                    let Some(gradient) = gradient else { continue };
                    assert_eq!(gradient.tensor.kind(), kind);
                    let distance = distance(&gradient, expected.as_ref().unwrap());
                    assert!(distance < tolerance, "{kind:?}, {subset:b}: {distance:e}");
                }
            }
        }
    }

    #[test]
    fn recorded_gradients_have_the_bits_of_a_second_forward() {
        for ((call, keys), kind) in calls().flat_map(|call| [Kind::Float, Kind::BFloat16].map(|kind| (call, kind))) {
            let qkv = [normal(40, kind), normal(keys, kind), normal(keys, kind)];
            let d_out = normal(40, kind);
            let [q, k, v] = by_head(&qkv, call);
            let again =
                super::super::pull_through([&q, &k, &v], [true; 3], &split_heads(&d_out, 3), |qkv| fused(qkv, call));
            let (_, graph) = Graph::of(qkv, call, [true; 3]);
            for (gradient, again) in graph.pull(&d_out, [true; 3]).into_iter().zip(again) {
                assert_eq!(gradient.unwrap().tensor, merge_heads(&again.unwrap()).tensor);
            }
        }
    }

    #[test]
    fn memory_of_a_recorded_call_is_not_overwritten() {
        let (call, keys) = calls().next().unwrap();
        let qkv = [normal(40, Kind::Float), normal(keys, Kind::Float), normal(keys, Kind::Float)];
        let (out, graph) = Graph::of(qkv.clone(), call, [true; 3]);
        assert!(!out.can_mut() && qkv.iter().all(|x| !x.can_mut()));
        drop((graph, qkv));
        assert!(out.can_mut(), "the graph still holds the result");
    }
}
