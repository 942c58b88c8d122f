//! Calls of operators: a call runs on the backend of its operands and is recorded in Burn's autodiff graph.
//!
//! A `Tensor` hides its backend in an enum. [`with_backend`] selects the backend, [`Primitives`] converts tensors to
//! the backend's own and back, and [`call`] does both for an [`Operator`].

use std::fmt;

use burn_tensor::Tensor;

use super::Kernels;
use crate::backend::autodiff::checkpoint::{base::Checkpointer, strategy::NoCheckpointing};
use crate::backend::autodiff::grads::Gradients;
use crate::backend::autodiff::ops::{Backward, Ops, OpsKind};
use crate::backend::tensor::FloatTensor as Floats;
use crate::backend::{
    Autodiff, AutodiffBackend, Backend, BackendTensor, DispatchAutodiffContext, DispatchKindConversion, DispatchTensor,
    DispatchTensorKind,
};

/// Evaluates an expression in which the type `$B` is the backend of the tensor `$x`, a [`DispatchTensor`]. `$B`
/// implements [`Kernels`]. Panics if this build has no kernels for the backend.
macro_rules! with_backend {
    ($x:expr, $B:ident => $result:expr) => {{
        use crate::backend::DispatchTensorKind;
        let kind = match &$x.kind {
            DispatchTensorKind::Autodiff(kind) => kind,
            kind => kind,
        };
        match kind {
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(_) => {
                type $B = crate::backend::Flex;
                $result
            }
            #[cfg(feature = "libtorch")]
            DispatchTensorKind::LibTorch(_) => {
                type $B = crate::backend::LibTorch;
                $result
            }
            #[cfg(feature = "cube")]
            DispatchTensorKind::Cube(_) => {
                type $B = crate::backend::Cube;
                $result
            }
            _ => panic!("this build has no operators for the backend of a tensor"),
        }
    }};
}
pub(super) use with_backend;

/// A backend whose own tensors can be taken out of `Tensor`s. The functions panic if a tensor is on another backend.
pub trait Primitives: Backend {
    /// Returns the backend's tensor, which may be part of an autodiff graph.
    fn backend_tensor(x: DispatchTensor) -> BackendTensor<Self>;

    /// Wraps a tensor of the backend. The autodiff context of the result is disabled.
    fn wrap(x: BackendTensor<Self>) -> DispatchTensor;

    /// Returns a float tensor without autodiff.
    fn constant(x: DispatchTensor) -> Floats<Self> {
        match Self::backend_tensor(x) {
            BackendTensor::Autodiff(x) => x.into_primitive(),
            x => x.float(),
        }
    }

    /// Returns a `Tensor` without autodiff.
    fn tensor<const D: usize>(x: Floats<Self>) -> Tensor<D> {
        Tensor::from_dispatch(Self::wrap(BackendTensor::Float(x)))
    }
}

impl<B: Backend> Primitives for B
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn backend_tensor(x: DispatchTensor) -> BackendTensor<B> {
        let kind = match x.kind {
            DispatchTensorKind::Autodiff(kind) => *kind,
            kind => kind,
        };
        let x = DispatchTensor { kind, autodiff: DispatchAutodiffContext::Disabled };
        DispatchTensor::try_into_backend(x).unwrap_or_else(|error| panic!("operands on different backends: {error}"))
    }

    fn wrap(x: BackendTensor<B>) -> DispatchTensor {
        DispatchTensor::from_backend(x)
    }
}

/// One call of a differentiable operator with `N` float operands. Other arguments, and tensors that get no gradient,
/// are fields of the implementing type.
pub trait Operator<const N: usize>: Sized {
    /// Returns the result alone; called if no operand is tracked by autodiff.
    fn forward<B: Kernels>(self, operands: [Floats<B>; N]) -> Floats<B> {
        self.record::<B>(operands, [false; N]).0
    }

    /// Returns the result and its pullback, which owns the values that the backward pass needs. `wanted` marks the
    /// operands that are tracked by autodiff. The pullback returns their gradients; without such operands it is not
    /// called.
    fn record<B: Kernels>(self, operands: [Floats<B>; N], wanted: [bool; N]) -> (Floats<B>, impl Pullback<B, N>);
}

/// The gradients of the operands of an operator; `None` for operands whose gradient is not wanted.
pub type Cotangents<B, const N: usize> = [Option<Floats<B>>; N];

/// Maps the cotangent of an operator's result to the gradients of its operands.
pub trait Pullback<B: Backend, const N: usize>: FnOnce(Floats<B>) -> Cotangents<B, N> + Send + 'static {}

impl<B, F, const N: usize> Pullback<B, N> for F
where
    B: Backend,
    F: FnOnce(Floats<B>) -> Cotangents<B, N> + Send + 'static,
{
}

/// Runs an operator on the backend of its operands, and records it if one of them is tracked by autodiff.
pub fn call<O: Operator<N>, const N: usize, const D: usize>(operator: O, operands: [DispatchTensor; N]) -> Tensor<D> {
    Tensor::from_dispatch(with_backend!(operands[0], B => call_on::<B, O, N>(operator, operands)))
}

fn call_on<B: Kernels, O: Operator<N>, const N: usize>(operator: O, operands: [DispatchTensor; N]) -> DispatchTensor {
    let disabled = DispatchAutodiffContext::Disabled;
    let autodiff = operands.iter().fold(disabled, |context, x| context.merge(x.autodiff));
    let operands = operands.map(B::backend_tensor);
    if autodiff == disabled {
        return B::wrap(BackendTensor::Float(operator.forward::<B>(operands.map(BackendTensor::float))));
    }
    let operands = operands.map(|x| match x {
        BackendTensor::Autodiff(x) => x,
        constant => Autodiff::<B>::from_inner(constant.float()),
    });
    let y = B::wrap(BackendTensor::Autodiff(record(operator, operands)));
    DispatchTensor { kind: DispatchTensorKind::Autodiff(Box::new(y.kind)), autodiff }
}

fn record<B: Kernels, O: Operator<N>, const N: usize>(
    operator: O,
    operands: [Floats<Autodiff<B>>; N],
) -> Floats<Autodiff<B>> {
    let nodes = operands.each_ref().map(|x| x.node());
    let wanted = operands.each_ref().map(is_tracked::<B>);
    let operands = operands.map(|x| x.into_primitive());
    if !wanted.contains(&true) {
        return Autodiff::<B>::from_inner(operator.forward::<B>(operands));
    }
    let (y, pullback) = operator.record::<B>(operands, wanted);
    Recorded(pullback).prepare::<NoCheckpointing>(nodes).compute_bound().stateless(y)
}

/// Whether a gradient flows to `operand`. Burn reports this only while an operator is prepared; the operator that is
/// prepared here is then dropped.
fn is_tracked<B: Backend>(operand: &Floats<Autodiff<B>>) -> bool {
    let pullback = |_| [None];
    let prepared = Recorded(pullback).prepare::<NoCheckpointing>([operand.node()]).compute_bound().stateful();
    matches!(prepared, OpsKind::<_, B, _, _, 1>::Tracked(_))
}

/// A pullback as an operator of Burn's autodiff.
struct Recorded<P>(P);

impl<P> fmt::Debug for Recorded<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recorded")
    }
}

impl<B: Backend, P: Pullback<B, N>, const N: usize> Backward<B, N> for Recorded<P> {
    type State = ();

    fn backward(self, ops: Ops<(), N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let cotangent = gradients.consume::<B>(&ops.node);
        for (parent, gradient) in ops.parents.into_iter().zip((self.0)(cotangent)) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}
