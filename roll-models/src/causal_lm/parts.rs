//! What a language model is put together from.

use roll_core::StateDict;

use super::chat::ChatTemplate;
use super::config::LmConfig;
use super::tokenizer::Tokenizer;

/// A model as it was read, before it is on a device.
pub struct Parts {
    /// Shape of the network.
    pub config: LmConfig,
    /// Weights under the names of Hugging Face.
    pub state: StateDict,
    /// Text to ids, where there is one.
    pub tokenizer: Option<Tokenizer>,
    /// How conversations are written, where it is told.
    pub template: Option<ChatTemplate>,
    /// Where all this was found, for messages.
    pub place: String,
}
