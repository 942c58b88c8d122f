//! Operators on libtorch: ATen's fused operators, forward and backward, and on GPUs the project's own kernels (`fused`)
//! between bf16 products.
//!
//! Burn's operations may write into a tensor that is the only owner of its storage. Every tensor returned here is
//! therefore either new memory or holds the storage that it is a view of.

mod attention;
mod conv;
mod decode;
mod elementwise;
mod fp8;
mod fused;
mod linear;
mod norm;

use burn_tensor::DType;
use tch::{Kind, Tensor};

use super::{BlockKernel, Conv2dKernel, GroupNormKernel, MaxPoolKernel, ProductKernel, ScaledKernel};
use crate::EightBits;
use crate::backend::LibTorch;
use crate::backend::libtorch::TchTensor;

pub(super) use fp8::check_gpu as check_fp8_gpu;

impl BlockKernel for LibTorch {}
impl Conv2dKernel for LibTorch {}
impl GroupNormKernel for LibTorch {}
impl MaxPoolKernel for LibTorch {}

impl ScaledKernel for LibTorch {
    fn decoded(kind: EightBits, codes: TchTensor, scales: TchTensor, dtype: DType) -> TchTensor {
        // ATen has types for the three formats. The bytes of the codes are reinterpreted as numbers of the format.
        let format = match kind {
            EightBits::Int8 => Kind::Int8,
            EightBits::E4m3 => Kind::Float8e4m3fn,
            EightBits::E5m2 => Kind::Float8e5m2,
        };
        let result_kind = if dtype == DType::BF16 { Kind::BFloat16 } else { Kind::Float };
        let codes = codes.tensor.view_dtype(format);
        // ATen multiplies int8 by f32 in one pass, but not fp8. bf16 represents every number of fp8 exactly.
        let codes = if kind == EightBits::Int8 { codes } else { codes.to_kind(Kind::BFloat16) };
        let values = Tensor::empty(codes.size(), (result_kind, codes.device()));
        let _ = codes.mul_out(&values, &scales.tensor.unsqueeze(1));
        fresh(values)
    }
}

impl ProductKernel for LibTorch {
    fn product(a: TchTensor, b: TchTensor) -> TchTensor {
        let (a, b) = (a.tensor, b.tensor);
        // On GPUs, the operands stay bf16 and their f32 accumulators are the result: a tenth of the time of f32
        // products.
        if a.kind() == Kind::BFloat16
            && let Some(product) = wide_product(&a, &b)
        {
            return fresh(product);
        }
        fresh(a.to_kind(Kind::Float).matmul(&b.to_kind(Kind::Float)))
    }
}

/// The f32 product of bf16 matrices, `[M, K]` by `[K, N]` or batches of them. `None` where ATen does not have it: on
/// the CPU, and in older versions.
fn wide_product(a: &Tensor, b: &Tensor) -> Option<Tensor> {
    if !a.device().is_cuda() {
        return None;
    }
    match a.dim() {
        2 => a.f_mm_dtype(b, Kind::Float).ok(),
        3 => a.f_bmm_dtype(b, Kind::Float).ok(),
        _ => None,
    }
}

/// Wraps a tensor that owns new memory.
fn fresh(tensor: Tensor) -> TchTensor {
    TchTensor::new(tensor)
}

/// The gradients of the `wanted` inputs by ATen's derivative of `forward`, which is run again: for operators whose
/// fused backward pass cannot be called directly. If `forward` does not depend on an input, its gradient is zero.
fn pull_through<const N: usize>(
    inputs: [&Tensor; N],
    wanted: [bool; N],
    d_y: &Tensor,
    forward: impl FnOnce([&Tensor; N]) -> Tensor,
) -> [Option<Tensor>; N] {
    let leaves: Vec<Tensor> =
        inputs.iter().zip(wanted).map(|(x, wanted)| x.detach().set_requires_grad(wanted)).collect();
    let tracked: Vec<&Tensor> = leaves.iter().zip(wanted).filter(|(_, wanted)| *wanted).map(|(x, _)| x).collect();
    if tracked.is_empty() {
        return [const { None }; N];
    }
    // The bindings differentiate scalars only. This scalar is the sum of y * d_y, whose gradient with respect to y is
    // exactly `d_y` for any dtype. Its value is not used and may be infinite in bf16.
    let scalar = tch::with_grad(|| {
        let y = forward(std::array::from_fn(|i| &leaves[i]));
        let (y, d_y) = (y.reshape([-1]), d_y.to_kind(y.kind()).reshape([-1]));
        // `dot` is a single kernel, but its element count is a 32-bit integer.
        match i32::try_from(y.numel()) {
            Ok(_) => y.dot(&d_y),
            Err(_) => (y * d_y).sum(None::<Kind>),
        }
    });
    let (keep_graph, create_graph) = (false, false);
    let mut gradients = Tensor::run_backward(&[scalar], &tracked, keep_graph, create_graph).into_iter();
    wanted.map(|wanted| if wanted { gradients.next() } else { None })
}
