//! The tokenizer: 256 bytes plus the words of the games. Any text can be encoded, and texts of the games are short.

use serde_json::{Map, Value, json};

use crate::World;

/// Chat template: `<|role|>content<|end|>` per message.
pub const TEMPLATE: &str = "{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}\
    {%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

/// Special tokens.
const SPECIAL: [&str; 4] = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"];

/// Words of both games. The words that only Sokoban uses are at the end.
const WORDS: [&str; 31] = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "Left",
    "Down",
    "Right",
    "Up",
    "at",
    " goal",
    " holes",
    " none",
    " left",
    " down",
    " right",
    " up",
    " 0",
    " 1",
    " 2",
    " 3",
    " 4",
    " 5",
    " 6",
    " 7",
    " 8",
    " 9",
    "\n",
    " box",
    " walls",
    " push",
    " from",
];

/// Number of words that only Sokoban uses.
const SOKOBAN_WORDS: usize = 4;

fn words(world: World) -> &'static [&'static str] {
    match world {
        World::FrozenLake => &WORDS[..WORDS.len() - SOKOBAN_WORDS],
        World::Sokoban => &WORDS,
    }
}

/// Returns the number of tokens.
pub fn vocabulary(world: World) -> usize {
    256 + SPECIAL.len() + words(world).len()
}

/// Id of the token that ends a turn.
pub const END: usize = 256 + SPECIAL.len() - 1;

/// Returns the contents of `tokenizer.json`.
pub fn json(world: World) -> Value {
    let vocab: Map<String, Value> = (0..=255u8).map(|byte| (written(byte).to_string(), json!(byte))).collect();
    let special = SPECIAL.iter().map(|text| (text, true));
    let words = words(world).iter().map(|text| (text, false));
    let added: Vec<Value> = special
        .chain(words)
        .enumerate()
        .map(|(i, (text, special))| {
            json!({
                "id": 256 + i, "content": text, "special": special, "single_word": false, "lstrip": false,
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
    use roll_causal_lm::Tokenizer;

    use super::*;

    #[test]
    fn any_text_comes_back_and_words_are_one_token() {
        let tokenizer = Tokenizer::parse(json(World::FrozenLake).to_string().as_bytes()).unwrap();
        assert_eq!(tokenizer.vocabulary(), vocabulary(World::FrozenLake));
        for text in ["<|user|>P_O\n__G<|end|>", "at 2 3, goal 1 4: up 1 right 1", "Übermut √ \u{0}\u{7f}"] {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
        }
        assert_eq!(tokenizer.encode("<|end|>").unwrap(), [END as u32]);
        assert_eq!(tokenizer.encode("<answer>Left</answer><|end|>").unwrap().len(), 4);
        assert_eq!(tokenizer.encode("__P_\nO_G_").unwrap().len(), 9);
        let tokenizer = Tokenizer::parse(json(World::Sokoban).to_string().as_bytes()).unwrap();
        assert_eq!(tokenizer.vocabulary(), vocabulary(World::Sokoban));
        assert_eq!(tokenizer.encode(" box walls push from").unwrap().len(), 4);
    }
}
