//! Tokens of a text that continues another text, for conversations that are tokenized piece by piece.

use roll_core::{LanguageModel, Picture, Result, without_picture_marks};

/// A text that ends a token: no tokenizer merges it with a letter after it.
const BREAK: &str = "\n";

/// Returns the tokens of `text` where it follows `before`. The marks of `text` are the places of `pictures`; those of
/// `before` are no places.
///
/// Most tokenizers get `text` alone, as when the model continued `before` itself. SentencePiece tokenizers write a
/// blank before each text that they get. For them, `before` and `text` are tokenized together, and the tokens of
/// `before` are removed. If a token reaches across the end of `before`, a line break takes the place of `before`.
pub(crate) fn tokenize_after(
    model: &dyn LanguageModel,
    before: &str,
    text: &str,
    pictures: &[Picture],
) -> Result<Vec<u32>> {
    if text.is_empty() || before.is_empty() || !adds_blank(model)? {
        return model.tokenize_with_pictures(text, pictures);
    }
    for prefix in [without_picture_marks(before).as_str(), BREAK] {
        let prefix_tokens = model.tokenize(prefix)?;
        let all_tokens = model.tokenize_with_pictures(&format!("{prefix}{text}"), pictures)?;
        if let Some(text_tokens) = all_tokens.strip_prefix(prefix_tokens.as_slice()) {
            return Ok(text_tokens.to_vec());
        }
    }
    model.tokenize_with_pictures(text, pictures)
}

/// Whether the tokenizer writes a blank before a text, or merges letters with a line break.
fn adds_blank(model: &dyn LanguageModel) -> Result<bool> {
    let separate = [model.tokenize(BREAK)?, model.tokenize("a")?].concat();
    Ok(model.tokenize(&format!("{BREAK}a"))? != separate)
}
