//! Memory of a rollout beside the weights, in bytes.

use super::cache::capacity_for;
use super::config::LmConfig;
use super::generate::TOKENS_OF_A_PASS;

/// A rollout whose rows are all written at the same time, and end together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollout {
    /// Rows.
    pub rows: usize,
    /// Different prompts among theirs.
    pub prompts: usize,
    /// Tokens of a prompt.
    pub prompt_tokens: usize,
    /// Tokens that a row writes.
    pub new_tokens: usize,
}

/// Bytes, by their purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolloutBytes {
    /// Keys and values, of each prompt once, and of the slots that rows write into.
    pub keys_values: usize,
    /// A layer's keys and values once more, while they move to larger memory.
    pub moving: usize,
    /// Results of a pass over prompts: the widest point of a block.
    pub pass: usize,
    /// Logits, where they are computed and where tokens are drawn.
    pub logits: usize,
}

impl RolloutBytes {
    /// The most that is held at a time: prompts are read before logits are many, and both beside keys and values.
    pub fn peak(&self) -> usize {
        self.keys_values + self.moving.max(self.pass).max(self.logits)
    }
}

impl Rollout {
    /// Its memory with a network of `config` that keeps keys and values in `width` bytes each.
    pub fn bytes(&self, config: &LmConfig, width: usize) -> RolloutBytes {
        let of_token = 2 * config.kv_heads * config.head_dim * width;
        // The token that is drawn last is never read.
        let needed = self.new_tokens.saturating_sub(1);
        let mut capacity = if needed == 0 { 0 } else { capacity_for(1, 0) };
        while capacity < needed {
            capacity = capacity_for(capacity + 1, capacity);
        }
        let slots = self.rows * capacity * of_token;
        let prompts = self.prompts * self.prompt_tokens * of_token;
        let of_pass = (TOKENS_OF_A_PASS / self.prompt_tokens.max(1)).clamp(1, self.prompts.max(1)) * self.prompt_tokens;
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        // Residual and normalised stream beside queries, keys, values and attention's result, or gate, up and product.
        let widest = 2 * config.dim + (2 * q + 2 * kv).max(3 * config.ffn_dim);
        RolloutBytes {
            keys_values: config.layers * (slots + prompts),
            moving: slots.max(prompts),
            pass: of_pass * widest * size_of::<f32>(),
            logits: 2 * self.rows.max(self.prompts) * config.vocab * size_of::<f32>(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn config() -> LmConfig {
        LmConfig::parse(
            br#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 64,
                 "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}"#,
        )
        .unwrap()
    }

    #[test]
    fn equal_prompts_are_counted_once_and_slots_in_full() {
        let rollout = Rollout { rows: 8, prompts: 2, prompt_tokens: 100, new_tokens: 40 };
        // Two key heads of width 4, keys and values, f32; slots have room for 64 tokens.
        let expected = 3 * (2 * 100 + 8 * 64) * 2 * 8 * 4;
        assert_eq!(rollout.bytes(&config(), 4).keys_values, expected);
        assert_eq!(rollout.bytes(&config(), 2).keys_values, expected / 2);
        let apart = Rollout { prompts: 8, ..rollout };
        assert_eq!(apart.bytes(&config(), 4).keys_values - expected, 3 * 6 * 100 * 2 * 8 * 4);
    }

    #[test]
    fn slots_have_room_as_the_cache_makes_it() {
        let slots = |new_tokens| {
            let rollout = Rollout { rows: 1, prompts: 1, prompt_tokens: 0, new_tokens };
            rollout.bytes(&config(), 4).keys_values / (3 * 2 * 8 * 4)
        };
        assert_eq!([1, 2, 33, 34, 65, 66, 2048].map(slots), [0, 32, 32, 64, 64, 128, 2048]);
    }

    #[test]
    fn a_pass_reads_whole_prompts_up_to_its_bound() {
        let pass = |prompts, prompt_tokens| {
            let rollout = Rollout { rows: 64, prompts, prompt_tokens, new_tokens: 1 };
            rollout.bytes(&config(), 4).pass / ((2 * 16 + 3 * 64) * 4)
        };
        assert_eq!([pass(2, 100), pass(64, 2048), pass(4, 20_000)], [200, 16_384, 20_000]);
    }
}
