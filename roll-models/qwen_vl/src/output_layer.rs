//! The output layer of a network that is read for states: its rows come from the file.

use std::sync::Arc;

use roll_core::{DType, Error, Result, Tensor};

use super::checkpoint::Weights;

/// Name of the output layer, unless it shares the weight of the embedding.
pub const HEAD: &str = "lm_head.weight";

/// An output layer of its own. It has as many bytes as the embedding (1.1 GB in a network of 7B), and a caller asks for a
/// few of its rows or for none, so that it is never in memory as a whole.
pub struct OutputLayer {
    pub weights: Weights,
    /// Dtype to which rows are rounded, as the other weights are.
    pub dtype: DType,
}

impl OutputLayer {
    /// Returns the rows of `ids`, f32 `[ids.len(), width]`. Fails on ids outside of the vocabulary.
    pub fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let stored = self.weights.tensor(HEAD)?;
        let &[vocabulary, width] = stored.shape() else {
            return Err(Error::shape(HEAD, "[vocabulary, width]", stored.shape()));
        };
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
            return Err(Error::Misuse(format!("the token id {id} is outside the vocabulary of {vocabulary}")));
        }
        let bytes = stored.as_bytes();
        let row = bytes.len() / vocabulary;
        let rows: Vec<u8> = ids.iter().flat_map(|id| &bytes[*id as usize * row..][..row]).copied().collect();
        let rows = Tensor::from_bytes(stored.dtype(), [ids.len(), width], Arc::new(rows))?.to_float(self.dtype)?;
        self.weights.release(HEAD);
        Tensor::new(rows.to_f32_vec(), [ids.len(), width])
    }
}
