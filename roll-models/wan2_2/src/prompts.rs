//! Encodes prompts as text embeddings. Prompts that a run will need are encoded together, because the encoder streams
//! its weights once per batch.

use std::collections::BTreeMap;

use roll_core::{Result, Tensor};

use super::tokenizer::Tokenizer;
use super::umt5::{Umt5, padded};

/// Number of prompts per batch. The XXL encoder streams its 11 GB of weights once for a batch; an embedding
/// computed ahead of its use takes at most 8 MB.
const BATCH: usize = 32;

/// The text encoder with its tokenizer.
pub struct TextEncoder {
    /// Converts text into ids.
    pub tokenizer: Tokenizer,
    /// Converts ids into embeddings.
    pub encoder: Umt5,
    /// Number of rows of an embedding, to which prompts are padded or cut.
    pub length: usize,
}

impl TextEncoder {
    /// Returns the embedding of `prompt`, f32 `[length, dim]`. Rows after its tokens are zero.
    pub fn encode(&self, prompt: &str) -> Result<Tensor> {
        self.encoder.encode(&self.tokenizer.encode(prompt, self.length)?, self.length)
    }

    /// Returns the embeddings of several prompts without padding; see [`Umt5::encode_all`].
    fn encode_all(&self, prompts: &[String]) -> Result<Vec<Tensor>> {
        let ids: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| self.tokenizer.encode(prompt, self.length)).collect::<Result<_>>()?;
        self.encoder.encode_all(&ids.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

/// The prompts that will be needed, and embeddings that were computed ahead of their use.
#[derive(Default)]
pub(super) struct Prompts {
    /// Prompts that will be needed.
    expected: Vec<String>,
    /// Embeddings without padding, by prompt.
    ready: BTreeMap<String, Tensor>,
}

impl Prompts {
    /// Replaces the prompts that will be needed; see [`roll_core::DiffusionModel::expect_prompts`]. The tokenizer warns
    /// of the first prompt that it cuts.
    pub(super) fn expect(&mut self, prompts: &[String], encoder: Option<&TextEncoder>) {
        if let Some(encoder) = encoder {
            // New prompts are tokenized only for the warning. An error is reported when the sample's prompt is encoded.
            let is_new = |prompt: &&String| !self.expected.contains(prompt) && !self.ready.contains_key(*prompt);
            for prompt in prompts.iter().filter(is_new) {
                let _ = encoder.tokenizer.encode(prompt, encoder.length);
            }
        }
        self.expected = prompts.to_vec();
    }

    /// Returns the embedding of `prompt`, equal to [`TextEncoder::encode`]. If it is not ready, it is encoded in
    /// one batch with expected prompts.
    pub(super) fn embedding(&mut self, prompt: &str, encoder: &TextEncoder) -> Result<Tensor> {
        if let Some(rows) = self.ready.get(prompt) {
            return padded(rows, encoder.length);
        }
        let mut batch = vec![prompt.to_string()];
        for other in &self.expected {
            if batch.len() < BATCH && !batch.contains(other) && !self.ready.contains_key(other) {
                batch.push(other.clone());
            }
        }
        let rows = encoder.encode_all(&batch)?;
        self.ready.retain(|prompt, _| self.expected.contains(prompt));
        self.ready.extend(batch.into_iter().zip(rows));
        padded(&self.ready[prompt], encoder.length)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::init_tiny::{WanKind, init_tiny};
    use super::super::paths::ComponentFiles;
    use super::*;

    #[test]
    fn batched_prompts_are_bit_exact_and_cached() {
        let dir = tempfile::tempdir().unwrap();
        let written = init_tiny(dir.path(), WanKind::T2v, 1).unwrap();
        let files = ComponentFiles::from_json(&written.model_paths).unwrap();
        let device = roll_backends::device("flex").unwrap();
        let text = TextEncoder {
            tokenizer: Tokenizer::load(&written.tokenizer).unwrap(),
            encoder: Umt5::streamed(files.text_encoder.as_ref().unwrap(), &device).unwrap(),
            length: 64,
        };
        let names: Vec<String> = (0..2 * BATCH).map(|i| format!("prompt {i}")).collect();
        let mut prompts = Prompts::default();
        prompts.expect(&names, Some(&text));
        let bits = |tensor: Tensor| tensor.as_bytes().to_vec();
        assert_eq!(bits(prompts.embedding("prompt 3", &text).unwrap()), bits(text.encode("prompt 3").unwrap()));
        assert_eq!(prompts.ready.len(), BATCH);
        assert_eq!(bits(prompts.embedding("prompt 7", &text).unwrap()), bits(text.encode("prompt 7").unwrap()));
        assert_eq!(prompts.ready.len(), BATCH);
        // Prompts that are no longer expected are dropped when the encoder runs next.
        prompts.expect(&names[names.len() - 1..], Some(&text));
        prompts.embedding("another", &text).unwrap();
        assert_eq!(prompts.ready.keys().collect::<Vec<_>>(), ["another", names.last().unwrap()]);
    }
}
