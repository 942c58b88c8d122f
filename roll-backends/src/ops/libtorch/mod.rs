//! libtorch: ATen's fused operators, forward and backward.
//!
//! Burn's operations on these tensors may write into a tensor that is the only owner of its storage. Therefore every tensor
//! returned here is either new memory or carries the storage that it is a view of.

mod attention;
mod elementwise;
#[cfg_attr(not(test), expect(dead_code, reason = "the operators do not call them yet"))]
mod fused;
mod linear;
mod norm;

use burn::backend::LibTorch;
use burn::backend::libtorch::TchTensor;
use tch::Tensor;

use super::{BlockKernel, ConvKernel, DecodeKernel, ProductKernel, ScaledKernel};

impl BlockKernel for LibTorch {}
impl ConvKernel for LibTorch {}
impl DecodeKernel for LibTorch {}
impl ProductKernel for LibTorch {}
impl ScaledKernel for LibTorch {}

/// A tensor of new memory.
fn fresh(tensor: Tensor) -> TchTensor {
    TchTensor::new(tensor)
}

/// The gradients of some of `inputs`, by ATen's own derivative of `f`, which is run once more: for what has a fused
/// backward that cannot be called by itself. A gradient that `f` does not depend on is zero.
fn pull_through<const N: usize>(
    inputs: [&Tensor; N],
    wanted: [bool; N],
    d_y: &Tensor,
    f: impl FnOnce([&Tensor; N]) -> Tensor,
) -> [Option<Tensor>; N] {
    let leaves: Vec<Tensor> =
        inputs.iter().zip(wanted).map(|(x, wanted)| x.detach().set_requires_grad(wanted)).collect();
    let tracked: Vec<&Tensor> = leaves.iter().zip(wanted).filter(|(_, wanted)| *wanted).map(|(x, _)| x).collect();
    if tracked.is_empty() {
        return [const { None }; N];
    }
    let y = tch::with_grad(|| {
        let y = f(std::array::from_fn(|i| &leaves[i]));
        // A scalar whose gradient with respect to y is d_y.
        y.reshape([-1]).dot(&d_y.reshape([-1]))
    });
    let mut found = Tensor::run_backward(&[y], &tracked, false, false).into_iter();
    wanted.map(|wanted| if wanted { found.next() } else { None })
}
