//! Value and pullback of a closure, through Burn's autodiff.

use std::cell::RefCell;

use burn_tensor::Tensor;
use roll_core::Result;

use crate::{NdTensor, Parameters, ops};

/// The parameters that a recorded computation read, as leaves of its autodiff graph.
///
/// A tape that is off returns plain values and records nothing.
#[derive(Debug)]
pub struct Tape {
    leaves: Option<RefCell<Vec<(usize, Tensor<1>)>>>,
}

impl Tape {
    /// Creates a tape that records parameters.
    pub fn on() -> Self {
        Self { leaves: Some(RefCell::default()) }
    }

    /// Creates a tape that records nothing.
    pub fn off() -> Self {
        Self { leaves: None }
    }

    /// Whether parameters are recorded.
    pub fn is_on(&self) -> bool {
        self.leaves.is_some()
    }

    /// Returns parameter `index` with value `value`: a leaf if the tape is on, the same leaf on every call.
    pub fn leaf(&self, index: usize, value: &Tensor<1>) -> Tensor<1> {
        let Some(leaves) = &self.leaves else { return value.clone() };
        let mut leaves = leaves.borrow_mut();
        if let Some((_, leaf)) = leaves.iter().find(|(i, _)| *i == index) {
            return leaf.clone();
        }
        let leaf = value.clone().autodiff().require_grad();
        leaves.push((index, leaf.clone()));
        leaf
    }
}

/// A recorded computation, ready for the cotangents of its outputs.
pub struct Recorded {
    inputs: Vec<NdTensor>,
    outputs: Vec<NdTensor>,
    tape: Tape,
}

/// Runs `f` on `inputs` and records it; `tape` collects the parameters that `f` reads. Returns the values of `f`,
/// outside any graph, and the recorded computation.
pub fn vjp(
    inputs: &[NdTensor],
    tape: Tape,
    f: impl FnOnce(&[NdTensor], &Tape) -> Result<Vec<NdTensor>>,
) -> Result<(Vec<NdTensor>, Recorded)> {
    let inputs: Vec<_> = inputs.iter().map(NdTensor::tracked).collect();
    let outputs = f(&inputs, &tape)?;
    let values = outputs.iter().cloned().map(NdTensor::untracked).collect();
    Ok((values, Recorded { inputs, outputs, tape }))
}

impl Recorded {
    /// Runs the backward pass: returns the cotangents of the inputs, given those of the outputs. `None` means zero, in
    /// both directions. Gradients of the parameters on the tape are added to `parameters`.
    pub fn pull(self, cotangents: Vec<Option<NdTensor>>, parameters: Option<&Parameters>) -> Vec<Option<NdTensor>> {
        let objective = self
            .outputs
            .into_iter()
            .zip(cotangents)
            // An output that depends on no leaf has no pullback.
            .filter_map(|(y, g)| g.filter(|_| y.device().is_autodiff()).map(|g| (y, g)))
            .map(|(y, g)| ops::seed(y.flat().clone(), g.flat().clone()))
            .reduce(|a, b| a + b);
        let Some(objective) = objective else { return self.inputs.iter().map(|_| None).collect() };
        let mut gradients = objective.backward();
        if let (Some(parameters), Some(leaves)) = (parameters, self.tape.leaves) {
            for (index, leaf) in leaves.into_inner() {
                if let Some(gradient) = leaf.grad_remove(&mut gradients) {
                    parameters.add_gradient(index, gradient);
                }
            }
        }
        self.inputs
            .into_iter()
            .map(|x| {
                let gradient = x.flat().grad_remove(&mut gradients)?;
                Some(NdTensor::from_flat(gradient, x.shape()))
            })
            .collect()
    }
}
