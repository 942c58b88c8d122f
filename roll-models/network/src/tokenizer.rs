//! The tokenizer of a `tokenizer.json`: text to token ids and back.
//!
//! The file is not trusted: it is parsed and run within the limits of [`roll_external::contain`], and a text that could
//! grow too much is refused first ([`Growth`]).

use std::path::Path;
use std::sync::Arc;

use roll_core::{Error, Result};
use roll_external::contain::contain;
use roll_external::files;
use roll_external::tokenizer_json::{Growth, LIMIT};
use tokenizers::{AddedToken, Tokenizer as Inner};

/// A tokenizer from a `tokenizer.json`.
pub struct Tokenizer {
    inner: Arc<Inner>,
    /// How much longer the file's rules can make a text.
    growth: Growth,
}

impl Tokenizer {
    /// Loads a `tokenizer.json`.
    pub fn load(file: &Path) -> Result<Self> {
        let bytes = files::read_filled(file, files::MAX_TEXT).map_err(Error::file("read", file))?;
        Self::parse(&bytes).map_err(|problem| Error::bad_file(file, problem))
    }

    /// Parses the text of a `tokenizer.json`.
    pub fn parse(json: &[u8]) -> std::result::Result<Self, String> {
        let bad = |problem: String| format!("expected a tokenizer.json, found one that fails: {problem}");
        let growth = Growth::of(json).map_err(bad)?;
        let bytes = json.to_vec();
        let inner = contain(LIMIT, move || Inner::from_bytes(bytes)).map_err(bad)?;
        let mut inner = inner.map_err(|e| bad(e.to_string()))?;
        // Prompts must not be padded or truncated.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| format!("cannot switch truncation off: {e}"))?;
        Ok(Self { inner: Arc::new(inner), growth })
    }

    /// Returns the ids of `text`. Special tokens in the text are recognised; none are added. Fails if the text is too
    /// long, or if the tokenizer fails, panics or takes longer than [`LIMIT`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let failed = |problem: String| Error::Unsupported(format!("cannot tokenize a text: {problem}"));
        self.growth.check(text).and_then(|()| self.ids(text.to_string())).map_err(failed)
    }

    /// Like [`Tokenizer::encode`], without the check of the length: [`Tokenizer::growth`] must allow `text`.
    pub fn ids(&self, text: String) -> std::result::Result<Vec<u32>, String> {
        let inner = Arc::clone(&self.inner);
        let add_special_tokens = false;
        let encoding = contain(LIMIT, move || inner.encode_fast(text, add_special_tokens))?;
        Ok(encoding.map_err(|e| e.to_string())?.get_ids().to_vec())
    }

    /// The bound of the texts that can be encoded.
    pub fn growth(&self) -> &Growth {
        &self.growth
    }

    /// Returns the text of `ids`, with special tokens. Fails as [`Tokenizer::encode`] does.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let failed = |problem: String| Error::Unsupported(format!("cannot turn tokens into text: {problem}"));
        let (inner, ids) = (Arc::clone(&self.inner), ids.to_vec());
        let skip_special_tokens = false;
        let text = contain(LIMIT, move || inner.decode(&ids, skip_special_tokens)).map_err(failed)?;
        text.map_err(|e| failed(e.to_string()))
    }

    /// Returns the upper bound of the ids (exclusive), including the ids of added tokens.
    pub fn vocabulary(&self) -> usize {
        // Ids may have gaps, so the bound follows from the largest id.
        self.inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1)
    }

    /// Returns the upper bound (exclusive) of the ids that are not of added tokens (special tokens and the like).
    pub fn base_vocabulary(&self) -> usize {
        let added = self.inner.get_added_tokens_decoder();
        let ids = self.inner.get_vocab(true).into_values().filter(|id| !added.contains_key(id));
        ids.max().map_or(0, |id| id as usize + 1)
    }

    /// Returns the text of one id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Adds a special token as the next id, and returns the id. Fails if the tokenizer refuses it.
    pub fn with_special_token(&mut self, token: &str) -> Result<u32> {
        let refused = || Error::Unsupported(format!("the tokenizer takes no special token `{token}`"));
        let inner = Arc::make_mut(&mut self.inner);
        inner.add_special_tokens([AddedToken::from(token, true)]).map_err(|_| refused())?;
        self.id(token).ok_or_else(refused)
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }
}
