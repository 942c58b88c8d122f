//! The parts of a language model.

use std::collections::BTreeMap;

use roll_backends::BlockMatrix;
use roll_core::{Result, StateDict, Tensor};

use super::chat::ChatTemplate;
use super::config::LmConfig;
use super::tokenizer::Tokenizer;

/// A model as it was read, before it is on a device.
pub struct Parts {
    /// Shape of the network.
    pub config: LmConfig,
    /// Weights under the names of Hugging Face, but those in `blocks`.
    pub state: StateDict,
    /// Matrices that the file has in blocks of small integers.
    pub blocks: BTreeMap<String, BlockMatrix>,
    /// Text to ids, where there is one.
    pub tokenizer: Option<Tokenizer>,
    /// The chat template, if the model's files have one.
    pub template: Option<ChatTemplate>,
    /// Where all this was found, for messages.
    pub place: String,
}

/// Adds `blocks` to `state`, as f32.
pub fn decode(state: &mut StateDict, blocks: &BTreeMap<String, BlockMatrix>) -> Result<()> {
    for (name, matrix) in blocks {
        let shape = matrix.shape();
        state.insert(name.clone(), Tensor::new(matrix.decode(0..shape[0]), shape)?);
    }
    Ok(())
}
