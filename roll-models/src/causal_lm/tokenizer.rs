//! Text to token ids and back, with a `tokenizer.json`.

use std::path::Path;

use roll_core::{Error, Result};
use tokenizers::Tokenizer as Inner;

/// Turns text into token ids.
pub struct Tokenizer {
    inner: Inner,
}

impl Tokenizer {
    /// Loads a `tokenizer.json`.
    pub fn load(file: &Path) -> Result<Self> {
        let bytes = std::fs::read(file).map_err(Error::file("read", file))?;
        Self::parse(&bytes).map_err(|problem| Error::bad_file(file, problem))
    }

    /// Parses the text of a `tokenizer.json`.
    pub fn parse(json: &[u8]) -> std::result::Result<Self, String> {
        let mut inner =
            Inner::from_bytes(json).map_err(|e| format!("expected a tokenizer.json, found one that fails: {e}"))?;
        // A prompt is never padded or cut behind the caller's back.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| format!("cannot switch truncation off: {e}"))?;
        Ok(Self { inner })
    }

    /// Ids of `text`. Special tokens are recognised where they are written out; none are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode(text, false);
        Ok(encoding.map_err(|e| Error::Misuse(format!("cannot tokenize a text: {e}")))?.get_ids().to_vec())
    }

    /// Text of `ids`, special tokens written out.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|e| Error::Misuse(format!("cannot turn tokens into text: {e}")))
    }

    /// Number of ids, added tokens included.
    pub fn vocabulary(&self) -> usize {
        // Ids may have gaps, so the largest counts.
        self.inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1)
    }

    /// Text of one id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }
}
