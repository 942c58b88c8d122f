//! The tokenizer: 256 bytes plus the words of the games. Any text can be encoded, and texts of the games are short.

use roll_network::byte_level::{self, BYTES};
use serde_json::Value;

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
    BYTES + SPECIAL.len() + words(world).len()
}

/// Id of the token that ends a turn.
pub const END: usize = BYTES + SPECIAL.len() - 1;

/// Returns the contents of `tokenizer.json`.
pub fn json(world: World) -> Value {
    byte_level::tokenizer_json(&SPECIAL, words(world))
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
