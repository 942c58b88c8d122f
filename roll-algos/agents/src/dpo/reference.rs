//! Log-probabilities of answers under the reference policy, each computed once.

use roll_core::{Error, Result, StateDict, Tensor};

/// Name of the tensor in checkpoints.
const TENSOR: &str = "reference_log_probs";

/// Log-probabilities of the chosen and the rejected answer of each pair, `[pairs, 2]`; NaN for a pair that was not
/// evaluated yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Reference {
    values: Vec<f64>,
}

impl Reference {
    /// No pair of `count` is evaluated.
    pub(super) fn new(count: usize) -> Self {
        Self { values: vec![f64::NAN; 2 * count] }
    }

    /// The log-probabilities of the answers of pair `row`; `None` if they are not known.
    pub(super) fn get(&self, row: usize) -> Option<[f64; 2]> {
        let pair = [self.values[2 * row], self.values[2 * row + 1]];
        (!pair.iter().any(|value| value.is_nan())).then_some(pair)
    }

    /// Stores the log-probabilities of the answers of pair `row`, unless they are known.
    pub(super) fn insert(&mut self, row: usize, log_probs: [f64; 2]) {
        if self.get(row).is_none() {
            self.values[2 * row..2 * row + 2].copy_from_slice(&log_probs);
        }
    }

    /// As a checkpoint has them: their bits, because tensors have no f64.
    pub(super) fn tensors(&self) -> Result<StateDict> {
        let bits: Vec<i64> = self.values.iter().map(|value| value.to_bits() as i64).collect();
        let tensor = Tensor::new(bits, [self.values.len() / 2, 2])?;
        Ok(StateDict::from_iter([(TENSOR.to_string(), tensor)]))
    }

    /// Restores [`Reference::tensors`].
    pub(super) fn load(&mut self, tensors: &StateDict) -> Result<()> {
        let missing = || Error::Misuse(format!("the checkpoint has no tensor `{TENSOR}`"));
        let bits = tensors.get(TENSOR).ok_or_else(missing)?.as_slice::<i64>()?;
        self.values = bits.iter().map(|bits| f64::from_bits(*bits as u64)).collect();
        Ok(())
    }
}
