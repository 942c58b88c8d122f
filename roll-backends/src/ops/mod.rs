//! Operators with a fused forward and their own backward.
//!
//! One file per family: the public function, the trait through which Burn's dispatch reaches it, the trait of kernels
//! that a backend implements, and the backward pass. The kernels have default bodies in the operations of any backend, so
//! that a backend joins by an empty implementation; flex overrides them with kernels of our own on host slices, libtorch
//! with ATen's fused ones, CubeCL's devices with kernels in CubeCL.

mod activation;
mod attention;
mod channel_norm;
mod conv;
mod cotangent;
#[cfg(feature = "cube")]
mod cube;
mod expression;
#[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
mod flex;
mod gate;
#[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
mod kernels;
#[cfg(feature = "libtorch")]
mod libtorch;
mod linear;
mod norm;
#[cfg(feature = "portable-kernels")]
mod portable;
mod product;
mod rope;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod tiled;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::{Autodiff, Backend, tensor::FloatTensor};
use burn::tensor::Tensor;

pub use activation::{Activation, ActivationKernel, ActivationOps, gelu_tanh, silu};
pub use attention::{AttentionCall, AttentionKernel, AttentionOps, AttentionOptions, attention, attention_with};
pub use channel_norm::{ChannelNormKernel, ChannelNormOps, channel_norm, channel_norm_silu};
pub use conv::{ConvKernel, ConvOps, conv3d};
pub use cotangent::{SeedOps, seed};
pub use gate::{GateKernel, GateOps, gated_add};
pub use linear::{LinearKernel, LinearOps, Lora, SavedLinear, linear, linear_lora};
pub use norm::{NormKernel, NormOps, SavedNorm, SharedShift, layer_norm, rms_norm};
pub use product::{ProductKernel, ProductOps, product};
pub use rope::{RopeKernel, RopeOps, rope};

/// Runs an operator and, if one of its parents is tracked, records it. `forward` returns the result and what the
/// backward needs.
fn operator<O, B, C, const N: usize>(
    backward: O,
    parents: [NodeGuard; N],
    forward: impl FnOnce() -> (FloatTensor<B>, O::State),
) -> FloatTensor<Autodiff<B, C>>
where
    O: Backward<B, N>,
    B: Backend,
    C: CheckpointStrategy,
{
    let (result, saved) = forward();
    match backward.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(saved, result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    }
}

/// The backward of an operator: `gradients_of` gets what the forward saved, the cotangent of the result and which
/// parents are tracked, and returns the gradients of those.
fn pull<B: Backend, S, const N: usize>(
    ops: Ops<S, N>,
    gradients: &mut Gradients,
    gradients_of: impl FnOnce(S, FloatTensor<B>, [bool; N]) -> [Option<FloatTensor<B>>; N],
) where
    S: Clone + Send + std::fmt::Debug + 'static,
{
    let cotangent = gradients.consume::<B>(&ops.node);
    let wanted = ops.parents.each_ref().map(Option::is_some);
    let found = gradients_of(ops.state, cotangent, wanted);
    for (parent, gradient) in ops.parents.into_iter().zip(found) {
        if let (Some(parent), Some(gradient)) = (parent, gradient) {
            gradients.register::<B>(parent.id, gradient);
        }
    }
}

fn assert_row_operand(what: &str, operand: &Tensor<2>, x: &Tensor<2>) {
    let ([rows, width], found) = (x.dims(), operand.dims());
    assert!(
        found[1] == width && (found[0] == 1 || found[0] == rows),
        "{what}: expected [1, {width}] or [{rows}, {width}], found {found:?}"
    );
}
