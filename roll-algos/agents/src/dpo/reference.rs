//! Log-probabilities of answers under the reference policy, each computed once.

use roll_core::{Error, Result, StateDict, Tensor};

/// Name of the tensor in checkpoints.
const TENSOR: &str = "reference_log_probs";

/// Log-probabilities of the chosen and the rejected answer of each pair, `[pairs, 2]`; NaN for a pair that was not
/// evaluated yet. They are kept in f32, so that a resumed run reads the same numbers from its checkpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Reference {
    values: Vec<f32>,
}

impl Reference {
    /// No pair of `count` is evaluated.
    pub(super) fn new(count: usize) -> Self {
        Self { values: vec![f32::NAN; 2 * count] }
    }

    /// The log-probabilities of the answers of pair `row`; `None` if they are not known.
    pub(super) fn get(&self, row: usize) -> Option<[f64; 2]> {
        let pair = [self.values[2 * row], self.values[2 * row + 1]].map(f64::from);
        (!pair.iter().any(|value| value.is_nan())).then_some(pair)
    }

    /// Stores the log-probabilities of the answers of pair `row`, unless they are known.
    pub(super) fn insert(&mut self, row: usize, log_probs: [f64; 2]) {
        if self.get(row).is_none() {
            self.values[2 * row..2 * row + 2].copy_from_slice(&log_probs.map(|value| value as f32));
        }
    }

    /// As a checkpoint has them.
    pub(super) fn tensors(&self) -> Result<StateDict> {
        let tensor = Tensor::new(self.values.clone(), [self.values.len() / 2, 2])?;
        Ok(StateDict::from_iter([(TENSOR.to_string(), tensor)]))
    }

    /// Restores [`Reference::tensors`].
    pub(super) fn load(&mut self, tensors: &StateDict) -> Result<()> {
        let missing = || Error::Misuse(format!("the checkpoint has no tensor `{TENSOR}`"));
        self.values = tensors.get(TENSOR).ok_or_else(missing)?.f32s()?.to_vec();
        Ok(())
    }
}
