//! Records operators with their own pullback in Burn's autodiff graph.

use std::fmt;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Backend, tensor::FloatTensor};

/// The gradients of the operands of an operator; `None` for operands that are not tracked.
pub type Cotangents<B, const N: usize> = [Option<FloatTensor<B>>; N];

/// Runs an operator on `operands` and records it if one of them is tracked.
///
/// `forward` returns the result and its pullback, a closure that owns the values the backward pass needs. The pullback
/// takes the cotangent of the result and which operands are tracked, and returns the gradients of those operands.
pub fn record<B, C, P, const N: usize>(
    operands: [FloatTensor<Autodiff<B, C>>; N],
    forward: impl FnOnce([FloatTensor<B>; N]) -> (FloatTensor<B>, P),
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    P: FnOnce(FloatTensor<B>, [bool; N]) -> Cotangents<B, N> + Send + 'static,
{
    record_wanted::<B, C, P, N>(operands, |operands, _| forward(operands))
}

/// Does what [`record`] does, for operators that save less, or nothing, if fewer operands are tracked: `forward` also
/// receives which operands are tracked.
pub fn record_wanted<B, C, P, const N: usize>(
    operands: [FloatTensor<Autodiff<B, C>>; N],
    forward: impl FnOnce([FloatTensor<B>; N], [bool; N]) -> (FloatTensor<B>, P),
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    P: FnOnce(FloatTensor<B>, [bool; N]) -> Cotangents<B, N> + Send + 'static,
{
    let nodes = operands.each_ref().map(|operand| operand.node());
    let tracked = operands.each_ref().map(is_tracked::<B, C>);
    let (result, pull) = forward(operands.map(|operand| operand.into_primitive()), tracked);
    Pullback(pull).prepare::<C>(nodes).compute_bound().stateless(result)
}

/// Whether a gradient flows to `operand`. Burn reports this when an operator is prepared; this one is never finished.
fn is_tracked<B: Backend, C: CheckpointStrategy>(operand: &FloatTensor<Autodiff<B, C>>) -> bool {
    let prepared = Backward::<B, 1>::prepare::<C>(Unfinished, [operand.node()]).compute_bound().stateful();
    matches!(prepared, OpsKind::Tracked(_))
}

/// An operator that is prepared but never becomes part of a graph.
#[derive(Debug)]
struct Unfinished;

impl<B: Backend> Backward<B, 1> for Unfinished {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {}
}

/// A pullback, as an operator of Burn's autodiff. Its state is owned by the closure.
struct Pullback<P>(P);

impl<P> fmt::Debug for Pullback<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pullback")
    }
}

impl<B, P, const N: usize> Backward<B, N> for Pullback<P>
where
    B: Backend,
    P: FnOnce(FloatTensor<B>, [bool; N]) -> Cotangents<B, N> + Send + 'static,
{
    type State = ();

    fn backward(self, ops: Ops<(), N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let cotangent = gradients.consume::<B>(&ops.node);
        let tracked = ops.parents.each_ref().map(Option::is_some);
        let found = (self.0)(cotangent, tracked);
        for (parent, gradient) in ops.parents.into_iter().zip(found) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}
