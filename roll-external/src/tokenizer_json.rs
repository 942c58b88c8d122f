//! Checks of a `tokenizer.json` before a tokenizer is made of it. The file often comes from another person, and its
//! normalizer or decoder could make a short text so long that memory runs out. [`Growth`] bounds the lengths.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

/// Time limit for making a tokenizer and for tokenizing one text; usual times are milliseconds.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of bytes of a text after normalization. The tokenizer needs about fifty times that memory.
const MAX_NORMALIZED: u64 = 32 << 20;
/// Maximum number of bytes that a decoder may put in the place of one token.
const MAX_DECODED: usize = 1024;
/// Maximum number of levels of normalizers or decoders within one another.
const MAX_DEPTH: usize = 16;

/// An upper bound on the length of a text after normalization: `factor` times its length, plus `added`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Normalized bytes per byte of the text.
    factor: u64,
    /// Further normalized bytes.
    added: u64,
}

/// The parts of a `tokenizer.json` that are checked. The vocabulary is skipped.
#[derive(Deserialize)]
struct CheckedParts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
}

impl Growth {
    /// Computes the bound from the text of a `tokenizer.json`. Fails if the text is not JSON, if a normalizer or
    /// decoder replaces an empty pattern, which matches everywhere, and on a decoder that makes tokens too long.
    pub fn of(json: &[u8]) -> Result<Self, String> {
        let parts: CheckedParts = serde_json::from_slice(json).map_err(|e| format!("expected JSON: {e}"))?;
        let mut growth = Self { factor: 1, added: 0 };
        growth.add_normalizer(&parts.normalizer, 0)?;
        check_decoder(&parts.decoder, 0)?;
        Ok(growth)
    }

    /// Fails if `text` may become longer by normalization than a tokenizer should be given.
    pub fn check(&self, text: &str) -> Result<(), String> {
        let bound = (text.len() as u64).saturating_mul(self.factor).saturating_add(self.added);
        if bound > MAX_NORMALIZED {
            return Err(format!(
                "a text of {} bytes is too long for this tokenizer, whose normalizer may make {bound} of them (at most \
                 {MAX_NORMALIZED})",
                text.len()
            ));
        }
        Ok(())
    }

    /// Extends the bound by a further normalizer, which reads the output of the normalizers so far. `depth` is the
    /// number of sequences around it.
    fn add_normalizer(&mut self, normalizer: &Value, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("normalizers nested more than {MAX_DEPTH} deep"));
        }
        let length = |key: &str| normalizer[key].as_str().map_or(0, str::len) as u64;
        let factor = match normalizer["type"].as_str().unwrap_or_default() {
            // No normalizer.
            "" => 1,
            "Sequence" => {
                for part in normalizer["normalizers"].as_array().into_iter().flatten() {
                    self.add_normalizer(part, depth + 1)?;
                }
                1
            }
            "Replace" => match normalizer["pattern"]["String"].as_str() {
                Some("") => return Err("a normalizer replaces an empty pattern".into()),
                Some(pattern) => length("content").div_ceil(pattern.len() as u64).max(1),
                // A regular expression may match between any two characters.
                None => length("content") + 1,
            },
            "Prepend" => {
                self.added = self.added.saturating_add(length("prepend"));
                1
            }
            "Precompiled" => longest_replacement(normalizer["precompiled_charsmap"].as_str().unwrap_or_default())?,
            // The worst case is U+FDFA: one character of three bytes becomes 18 characters of 33 bytes.
            "NFKC" | "NFKD" => 11,
            // NFC and NFD at most triple the bytes; changes of case and other normalizers add less.
            _ => 3,
        };
        self.factor = self.factor.saturating_mul(factor);
        self.added = self.added.saturating_mul(factor);
        Ok(())
    }
}

/// Fails on a decoder that replaces an empty pattern, or that replaces a token by more than [`MAX_DECODED`] bytes.
/// `depth` is the number of sequences around it.
fn check_decoder(decoder: &Value, depth: usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!("decoders nested more than {MAX_DEPTH} deep"));
    }
    decoder["decoders"].as_array().into_iter().flatten().try_for_each(|part| check_decoder(part, depth + 1))?;
    if decoder["pattern"]["String"].as_str() == Some("") {
        return Err("a decoder replaces an empty pattern".into());
    }
    match decoder["content"].as_str().map_or(0, str::len) {
        0..=MAX_DECODED => Ok(()),
        n => Err(format!("a decoder replaces by {n} bytes, more than {MAX_DECODED}")),
    }
}

/// The number of bytes of the longest replacement of a character in sentencepiece's map of characters. The map consists
/// of the size of a trie (u32), the trie, and the replacements, each of which ends with a zero byte.
fn longest_replacement(base64: &str) -> Result<u64, String> {
    let map = from_base64(base64).ok_or("a `precompiled_charsmap` that is not base64")?;
    let trie_size = map.first_chunk::<4>().map_or(0, |bytes| u32::from_le_bytes(*bytes)) as usize;
    let replacements = map.get(4 + trie_size..).ok_or("a `precompiled_charsmap` that is shorter than it says")?;
    Ok(replacements.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0).max(1) as u64)
}

/// Decodes base64: four digits of six bits become three bytes. `None` if `text` has another character.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| -> Option<u32> {
        Some(u32::from(match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        }))
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let value = four.iter().try_fold(0, |value, byte| Some(value << 6 | digit(*byte)?))?;
        // The last group may have fewer digits: n digits hold n - 1 bytes.
        let value = value << (6 * (4 - four.len()));
        bytes.extend(&value.to_be_bytes()[1..four.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn growth(normalizer: Value) -> Result<Growth, String> {
        Growth::of(json!({ "normalizer": normalizer }).to_string().as_bytes())
    }

    #[test]
    fn normalizer_growth_is_bounded() {
        let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
        assert_eq!(growth(Value::Null), Ok(Growth { factor: 1, added: 0 }));
        assert_eq!(growth(replace(" ", "\u{2581}")), Ok(Growth { factor: 3, added: 0 }));
        assert_eq!(growth(replace("    ", "x")), Ok(Growth { factor: 1, added: 0 }));
        let both = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "ab"}, replace("a", "12345"), {"type": "Replace", "pattern": {"Regex": "."}, "content": "x"},
        ]});
        assert_eq!(growth(both), Ok(Growth { factor: 10, added: 20 }));
        assert!(growth(replace("", "x")).unwrap_err().contains("empty pattern"));
        let deep = (0..20).fold(Value::Null, |inner, _| json!({"type": "Sequence", "normalizers": [inner]}));
        assert!(growth(deep).unwrap_err().contains("nested"));
    }

    #[test]
    fn rejects_texts_that_would_grow_too_long() {
        let huge =
            growth(json!({"type": "Replace", "pattern": {"String": "a"}, "content": "b".repeat(1 << 20)})).unwrap();
        assert!(huge.check("a cat").is_ok());
        assert!(huge.check(&"a".repeat(40)).unwrap_err().contains("41943040"));
        let json = |decoder: Value| Growth::of(json!({ "decoder": decoder }).to_string().as_bytes());
        assert!(json(json!({"type": "Replace", "pattern": {"String": "a"}, "content": "b".repeat(2000)})).is_err());
        assert!(
            json(json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": ""}}]})).is_err()
        );
    }

    #[test]
    fn character_maps_are_bounded_by_their_longest_text() {
        // A trie of 4 bytes, then "ab\0cde\0".
        let map = [4, 0, 0, 0, 9, 9, 9, 9, b'a', b'b', 0, b'c', b'd', b'e', 0];
        assert_eq!(from_base64("BAAAAAkJCQlhYgBjZGUA").unwrap(), map);
        assert_eq!(from_base64("YQ==").unwrap(), b"a");
        assert_eq!(longest_replacement("BAAAAAkJCQlhYgBjZGUA"), Ok(3));
        assert!(longest_replacement("BQAAAA==").unwrap_err().contains("shorter") && longest_replacement("%").is_err());
    }
}
