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
    /// Index and leaf of each parameter; `None` if the tape is off.
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

    /// Returns parameter `index`, whose value is `value`. If the tape is on, the returned tensor is a leaf of the
    /// autodiff graph, the same one on every call with this index.
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

/// Runs `forward` on `inputs` and records it; `tape` collects the parameters that `forward` reads. Returns the values
/// of `forward`, outside any graph, and the recorded computation.
pub fn vjp(
    inputs: &[NdTensor],
    tape: Tape,
    forward: impl FnOnce(&[NdTensor], &Tape) -> Result<Vec<NdTensor>>,
) -> Result<(Vec<NdTensor>, Recorded)> {
    let inputs: Vec<_> = inputs.iter().map(NdTensor::tracked).collect();
    let outputs = forward(&inputs, &tape)?;
    let values = outputs.iter().cloned().map(NdTensor::untracked).collect();
    Ok((values, Recorded { inputs, outputs, tape }))
}

impl Recorded {
    /// Runs the backward pass: takes the cotangents of the outputs and returns the cotangents of the inputs. A
    /// cotangent that is `None` is zero. Gradients of the parameters on the tape are added to `parameters`.
    pub fn pull(self, cotangents: Vec<Option<NdTensor>>, parameters: Option<&Parameters>) -> Vec<Option<NdTensor>> {
        // A scalar whose gradient with respect to each output is the output's cotangent.
        let objective = self
            .outputs
            .into_iter()
            .zip(cotangents)
            .filter_map(|(output, cotangent)| Some((output, cotangent?)))
            // An output that depends on no leaf has no gradient.
            .filter(|(output, _)| output.device().is_autodiff())
            .map(|(output, cotangent)| ops::seed(output.flat().clone(), cotangent.flat().clone()))
            .reduce(|sum, term| sum + term);
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
