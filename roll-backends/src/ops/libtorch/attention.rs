//! ATen's fused scaled-dot-product attention, forward and backward: no matrix of all queries by all keys on any device.

use burn::backend::libtorch::TchTensor;
use burn::backend::{LibTorch, tensor::FloatTensor};
use tch::Tensor;

use super::{fresh, pull_through};
use crate::ops::{AttentionCall, AttentionKernel, Cotangents, tiled};

impl AttentionKernel for LibTorch {
    fn attention_forward(qkv: [FloatTensor<Self>; 3], call: AttentionCall) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [q, k, v] = match Path::of(&qkv, call) {
            Path::Tiled => return tiled::forward::<Self>(qkv, call),
            Path::Flash => by_head(&qkv, call),
            Path::Fused => {
                let [q, k, v] = by_head(&qkv, call);
                // Its sums of exponentials are ATen's own business.
                let none = Tensor::empty([0], (q.kind(), q.device()));
                return (together(&fused([&q, &k, &v], call)), fresh(none));
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
        (together(&out), fresh(log_sums))
    }

    fn attention_backward(
        qkv: [FloatTensor<Self>; 3],
        out: FloatTensor<Self>,
        softmax: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        let path = Path::of(&qkv, call);
        if path == Path::Tiled {
            return tiled::backward::<Self>(qkv, out, softmax, d_out, call, wanted);
        }
        let [q, k, v] = by_head(&qkv, call);
        let [out, d_out] = [out, d_out].map(|x| split(&x, call.heads));
        let found = match path {
            Path::Flash => {
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
                [dq, dk, dv].map(Some)
            }
            _ => pull_through([&q, &k, &v], wanted, &d_out, |qkv| fused(qkv, call)),
        };
        let mut found = found.into_iter();
        wanted.map(|wanted| found.next().flatten().filter(|_| wanted).map(|d| together(&d)))
    }
}

/// The kernel that computes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// ATen's flash kernel for the CPU, whose backward takes what its forward kept.
    Flash,
    /// What ATen chooses among its fused kernels for the device. The bindings have no backward of these, so ATen's own
    /// derivative is taken, which computes the call once more.
    Fused,
    /// Blocks of our own: where ATen's causal mask is not ours (it aligns the first query with the first key), with a window
    /// or a bound of the scores, and where there is nothing to compute.
    Tiled,
}

impl Path {
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

fn fused([q, k, v]: [&Tensor; 3], call: AttentionCall) -> Tensor {
    let scale = f64::from(call.scale);
    Tensor::scaled_dot_product_attention(q, k, v, None::<Tensor>, 0.0, call.causal, scale, false)
}

fn by_head(qkv: &[TchTensor; 3], call: AttentionCall) -> [Tensor; 3] {
    [0, 1, 2].map(|i| split(&qkv[i], call.heads))
}

/// `[rows, heads * d]` as `[1, heads, rows, d]`. The kernels want the numbers of a row in order; a copy is made where they
/// are not.
fn split(x: &TchTensor, heads: usize) -> Tensor {
    let [rows, channels] = [x.tensor.size()[0], x.tensor.size()[1]];
    x.tensor.contiguous().view([1, rows, heads as i64, channels / heads as i64]).transpose(1, 2)
}

/// The reverse, as new memory: ATen's results have the rows outermost already.
fn together(x: &Tensor) -> TchTensor {
    let [heads, rows, width] = [x.size()[1], x.size()[2], x.size()[3]];
    fresh(x.transpose(1, 2).reshape([rows, heads * width]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The kernels that GPUs take, here on the CPU, beside the one for the CPU.
    #[test]
    fn the_derivative_that_aten_takes_itself_is_that_of_the_flash_kernel() {
        for (causal, keys) in [(false, 33), (true, 40)] {
            let call = AttentionCall { heads: 3, scale: 0.3, causal, window: None, softcap: None };
            let normal = |rows: i64| Tensor::randn([1, 3, rows, 8], (tch::Kind::Float, tch::Device::Cpu));
            let (q, k, v, d_out) = (normal(40), normal(keys), normal(keys), normal(40));
            let all = [&q, &k, &v];
            let flat = all.map(together);
            let (out, softmax) = LibTorch::attention_forward(flat.clone(), call);
            let expected = LibTorch::attention_backward(flat, out.clone(), softmax, together(&d_out), call, [true; 3]);
            let near = |a: &Tensor, b: &Tensor| f64::try_from((a - b).abs().max() / b.abs().max()).unwrap() < 2e-6;
            assert!(near(&together(&fused(all, call)).tensor, &out.tensor));
            let found = pull_through(all, [true; 3], &d_out, |qkv| fused(qkv, call));
            for (found, expected) in found.into_iter().zip(expected) {
                assert!(near(&together(&found.unwrap()).tensor, &expected.unwrap().tensor));
            }
        }
    }
}
