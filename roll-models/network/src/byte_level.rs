//! A byte-level `tokenizer.json` without merges: any text can be encoded.

use serde_json::{Map, Value, json};

/// Number of ids of single bytes. The ids of added tokens follow them.
pub const BYTES: usize = 256;

/// Returns the contents of a `tokenizer.json` with one token per byte (its id is the byte) and one per added text, with
/// ids from [`BYTES`] on. `special` texts come first; they are special tokens, `words` are not.
pub fn tokenizer_json(special: &[&str], words: &[&str]) -> Value {
    let vocab: Map<String, Value> = (0..=255u8).map(|byte| (written(byte).to_string(), json!(byte))).collect();
    let added = special.iter().map(|text| (text, true)).chain(words.iter().map(|text| (text, false)));
    let added: Vec<Value> = added
        .enumerate()
        .map(|(i, (text, special))| {
            json!({
                "id": BYTES + i, "content": text, "special": special, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false,
            })
        })
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
}

/// Returns the character that byte-level tokenizers write for a byte: the byte itself if it is printable, otherwise a
/// character from U+0100 on.
fn written(byte: u8) -> char {
    let seen = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match seen(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|b| !seen(*b)).count() as u32;
            char::from_u32(256 + before).unwrap_or(' ')
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tokenizer::Tokenizer;

    #[test]
    fn any_text_comes_back_and_added_texts_are_one_token() {
        let json = tokenizer_json(&["<|end|>"], &[" glasses"]).to_string();
        let tokenizer = Tokenizer::parse(json.as_bytes()).unwrap();
        assert_eq!(tokenizer.vocabulary(), BYTES + 2);
        for text in ["red hair, glasses<|end|>", "Übermut √ \u{0}\u{7f}\n"] {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
        }
        assert_eq!(tokenizer.encode("<|end|> glasses").unwrap(), [BYTES as u32, BYTES as u32 + 1]);
    }
}
