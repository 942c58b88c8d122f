//! Estimates the memory of a rollout, other than the weights, for `roll plan`.

use super::config::LmConfig;
use super::generate::TOKENS_OF_A_PASS;

/// The last turn of a rollout, in which every sequence has its maximal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RolloutShape {
    /// Sequences that have a slot, and the tokens of a slot.
    pub slots: usize,
    pub slot_tokens: usize,
    /// Tokens of prompts that are cached outside of slots.
    pub packed_tokens: usize,
    /// Rows that are generated at a time.
    pub rows: usize,
    /// Number of distinct prompts of a call, and their tokens.
    pub prompts: usize,
    pub prompt_tokens: usize,
}

/// The memory of a rollout in bytes, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RolloutBytes {
    /// Keys and values of the packed prompts and of the slots.
    pub keys_values: usize,
    /// A second copy of one layer's keys and values, while its tensors grow.
    pub growth: usize,
    /// Activations of a pass over prompts, at the widest point of a block.
    pub pass: usize,
    /// Logits on the device, and their copy on the host.
    pub logits: usize,
}

impl RolloutShape {
    /// Returns the memory with a network of `config` whose cached keys and values have `element_bytes` bytes each.
    pub fn bytes(&self, config: &LmConfig, element_bytes: usize) -> RolloutBytes {
        let token_bytes = 2 * config.kv_heads * config.head_dim * element_bytes;
        let (slots, packed) = (self.slots * self.slot_tokens * token_bytes, self.packed_tokens * token_bytes);
        let tokens_of_pass =
            (TOKENS_OF_A_PASS / self.prompt_tokens.max(1)).clamp(1, self.prompts.max(1)) * self.prompt_tokens;
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        // Values per token: the residual and its norm, with queries, keys, values and the output of attention, or with
        // gate, up and their product.
        let widest = 2 * config.dim + (2 * q + 2 * kv).max(3 * config.ffn_dim);
        RolloutBytes {
            keys_values: config.layers * (slots + packed),
            growth: slots.max(packed),
            pass: tokens_of_pass * widest * size_of::<f32>(),
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
    fn counts_packed_prompts_and_all_slots() {
        let rollout =
            RolloutShape { slots: 8, slot_tokens: 39, packed_tokens: 200, rows: 8, prompts: 2, prompt_tokens: 100 };
        // Two key heads of width 4, keys and values, f32.
        let expected = 3 * (200 + 8 * 39) * 2 * 8 * 4;
        assert_eq!(rollout.bytes(&config(), 4).keys_values, expected);
        assert_eq!(rollout.bytes(&config(), 2).keys_values, expected / 2);
        assert_eq!(rollout.bytes(&config(), 4).growth, 8 * 39 * 2 * 8 * 4);
    }

    #[test]
    fn passes_have_whole_prompts_up_to_the_bound() {
        let pass = |prompts, prompt_tokens| {
            let rollout = RolloutShape { slots: 0, slot_tokens: 0, packed_tokens: 0, rows: 64, prompts, prompt_tokens };
            rollout.bytes(&config(), 4).pass / ((2 * 16 + 3 * 64) * 4)
        };
        assert_eq!([pass(2, 100), pass(64, 2048), pass(4, 20_000)], [200, 16_384, 20_000]);
    }
}
