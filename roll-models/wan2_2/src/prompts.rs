//! Encodes prompts as text embeddings.

use roll_core::{Result, Tensor};
use roll_network::prompts::Prompts;

use super::tokenizer::Tokenizer;
use super::umt5::{Umt5, padded};

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

/// Announces the prompts that will be needed. The tokenizer warns of the first prompt that it cuts.
pub(super) fn expect(prompts: &mut Prompts, texts: &[String], encoder: Option<&TextEncoder>) {
    if let Some(encoder) = encoder {
        // New prompts are tokenized only for the warning. An error is reported when the sample's prompt is encoded.
        for prompt in texts.iter().filter(|prompt| prompts.is_new(prompt)) {
            let _ = encoder.tokenizer.encode(prompt, encoder.length);
        }
    }
    prompts.expect(texts);
}

/// Returns the embedding of `prompt`, equal to [`TextEncoder::encode`].
pub(super) fn embedding(prompts: &mut Prompts, prompt: &str, encoder: &TextEncoder) -> Result<Tensor> {
    padded(&prompts.features(prompt, |batch| encoder.encode_all(batch))?, encoder.length)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::init_tiny::{WanKind, init_tiny};
    use super::super::paths::ComponentFiles;
    use roll_network::prompts::BATCH;

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
        expect(&mut prompts, &names, Some(&text));
        let bits = |tensor: Tensor| tensor.as_bytes().to_vec();
        assert_eq!(bits(embedding(&mut prompts, "prompt 3", &text).unwrap()), bits(text.encode("prompt 3").unwrap()));
        assert_eq!(prompts.ready().count(), BATCH);
        assert_eq!(bits(embedding(&mut prompts, "prompt 7", &text).unwrap()), bits(text.encode("prompt 7").unwrap()));
        assert_eq!(prompts.ready().count(), BATCH);
        // Prompts that are no longer expected are dropped when the encoder runs next.
        expect(&mut prompts, &names[names.len() - 1..], Some(&text));
        embedding(&mut prompts, "another", &text).unwrap();
        assert_eq!(prompts.ready().collect::<Vec<_>>(), ["another", names.last().unwrap()]);
    }
}
