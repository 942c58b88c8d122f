//! A language model as its files contain it: the result of reading a directory or a GGUF file, before the network is
//! made.

use std::collections::BTreeMap;

use roll_backends::BlockMatrix;
use roll_core::{Result, StateDict, Tensor};
use roll_network::tokenizer::Tokenizer;

use super::chat::ChatTemplate;
use super::config::LmConfig;

/// A model in host memory, before it is on a device.
pub struct LoadedModel {
    /// Architecture.
    pub config: LmConfig,
    /// Weights under their Hugging Face names, except those in `quantised`.
    pub state: StateDict,
    /// Quantised matrices in the blocks of a GGUF file.
    pub quantised: BTreeMap<String, BlockMatrix>,
    /// The tokenizer, if there is one beside the weights.
    pub tokenizer: Option<Tokenizer>,
    /// The chat template, likewise.
    pub template: Option<ChatTemplate>,
    /// Path of the files, for messages.
    pub location: String,
}

/// Dequantises the matrices of `quantised` to f32 and adds them to `state`.
pub fn decode(state: &mut StateDict, quantised: &BTreeMap<String, BlockMatrix>) -> Result<()> {
    for (name, matrix) in quantised {
        state.insert(name.clone(), decoded(matrix)?);
    }
    Ok(())
}

/// Returns `matrix` in f32.
pub fn decoded(matrix: &BlockMatrix) -> Result<Tensor> {
    let shape = matrix.shape();
    Tensor::new(matrix.decode(0..shape[0]), shape)
}
