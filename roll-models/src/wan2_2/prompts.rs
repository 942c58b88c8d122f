//! Prompts to embeddings, several at a time.

use std::collections::BTreeMap;

use roll_core::{Result, Tensor};

use super::tokenizer::Tokenizer;
use super::umt5::{Umt5, padded};

/// Prompts that are encoded together. The XXL encoder has 11 GB, which are read once for all of them; their embeddings
/// have 8 MB each at most.
pub const TOGETHER: usize = 32;

/// Prompts to embeddings.
pub struct TextEncoder {
    /// Text to ids.
    pub tokenizer: Tokenizer,
    /// Ids to embeddings.
    pub encoder: Umt5,
    /// Rows of an embedding: prompts are padded or cut to this length.
    pub length: usize,
}

impl TextEncoder {
    /// The embedding of `prompt`, `[length, dim]`, rows beyond its tokens zero.
    pub fn encode(&self, prompt: &str) -> Result<Tensor> {
        self.encoder.encode(&self.tokenizer.encode(prompt, self.length)?, self.length)
    }

    /// Those of several prompts, without padding, as [`Umt5::encode_all`].
    fn encode_all(&self, prompts: &[String]) -> Result<Vec<Tensor>> {
        let ids: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| self.tokenizer.encode(prompt, self.length)).collect::<Result<_>>()?;
        self.encoder.encode_all(&ids.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

/// Prompts that are expected, and embeddings that were made before they were asked for.
#[derive(Default)]
pub(super) struct Prompts {
    expected: Vec<String>,
    /// Without padding.
    ready: BTreeMap<String, Tensor>,
}

impl Prompts {
    /// See [`roll_core::DiffusionModel::expect_prompts`].
    pub(super) fn expect(&mut self, prompts: &[String]) {
        self.expected = prompts.to_vec();
    }

    /// The embedding of `prompt`, as [`TextEncoder::encode`]. One that is not ready is encoded together with those that
    /// are expected.
    pub(super) fn embedding(&mut self, prompt: &str, text: &TextEncoder) -> Result<Tensor> {
        if let Some(rows) = self.ready.get(prompt) {
            return padded(rows, text.length);
        }
        let mut together = vec![prompt.to_string()];
        for other in &self.expected {
            if together.len() < TOGETHER && !together.contains(other) && !self.ready.contains_key(other) {
                together.push(other.clone());
            }
        }
        let rows = text.encode_all(&together)?;
        self.ready.retain(|prompt, _| self.expected.contains(prompt));
        self.ready.extend(together.into_iter().zip(rows));
        padded(&self.ready[prompt], text.length)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::init_tiny::{TinyKind, init_tiny};
    use super::super::paths::ComponentFiles;
    use super::*;

    #[test]
    fn expected_prompts_are_encoded_with_the_first_and_have_its_bits() {
        let dir = tempfile::tempdir().unwrap();
        let written = init_tiny(dir.path(), TinyKind::T2v, 1).unwrap();
        let files = ComponentFiles::from_json(&written.model_paths).unwrap();
        let device = roll_backends::device("flex").unwrap();
        let text = TextEncoder {
            tokenizer: Tokenizer::load(&written.tokenizer).unwrap(),
            encoder: Umt5::streamed(files.text_encoder.as_ref().unwrap(), &device).unwrap(),
            length: 64,
        };
        let names: Vec<String> = (0..2 * TOGETHER).map(|i| format!("prompt {i}")).collect();
        let mut prompts = Prompts::default();
        prompts.expect(&names);
        let bits = |tensor: Tensor| tensor.as_bytes().to_vec();
        assert_eq!(bits(prompts.embedding("prompt 3", &text).unwrap()), bits(text.encode("prompt 3").unwrap()));
        assert_eq!(prompts.ready.len(), TOGETHER);
        assert_eq!(bits(prompts.embedding("prompt 7", &text).unwrap()), bits(text.encode("prompt 7").unwrap()));
        assert_eq!(prompts.ready.len(), TOGETHER);
        // Prompts that are no longer expected are dropped at the next reading.
        prompts.expect(&names[names.len() - 1..]);
        prompts.embedding("another", &text).unwrap();
        assert_eq!(prompts.ready.keys().collect::<Vec<_>>(), ["another", names.last().unwrap()]);
    }
}
