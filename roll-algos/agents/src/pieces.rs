//! Texts that are tokenized in pieces.

use roll_core::{LanguageModel, Result};

/// A text that no tokenizer merges with a letter after it.
const BREAK: &str = "\n";

/// Returns the tokens of `text` where it follows `before`.
///
/// Most tokenizers get `text` alone, as when the model continued `before` itself. SentencePiece tokenizers write a
/// blank before each text that they get. For them these are the tokens that follow those of `before` in both texts together,
/// or of a line break if `before` ends within a token.
pub(crate) fn tokenize_after(model: &dyn LanguageModel, before: &str, text: &str) -> Result<Vec<u32>> {
    if text.is_empty() || before.is_empty() || !adds_blank(model)? {
        return model.tokenize(text);
    }
    for before in [before, BREAK] {
        let (ahead, both) = (model.tokenize(before)?, model.tokenize(&format!("{before}{text}"))?);
        if let Some(after) = both.strip_prefix(ahead.as_slice()) {
            return Ok(after.to_vec());
        }
    }
    model.tokenize(text)
}

/// Whether the tokenizer writes a blank before a text, or merges letters with a line break.
fn adds_blank(model: &dyn LanguageModel) -> Result<bool> {
    let apart = [model.tokenize(BREAK)?, model.tokenize("a")?].concat();
    Ok(model.tokenize(&format!("{BREAK}a"))? != apart)
}
