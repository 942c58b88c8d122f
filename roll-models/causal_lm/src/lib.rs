//! Causal language models: Qwen2, Qwen2.5, Qwen3, Llama, Mistral, Gemma 2 and 3, and Phi-3 in one implementation,
//! configured by `config.json`.
//!
//! Batches are packed without padding (`packed`). The network is a chain of segments (`block`), like the video
//! transformer; the backward pass recomputes them one by one. The output layer ([`head`]) computes log-probabilities
//! and entropies without holding the logits.
//!
//! It depends on `roll-core`, `roll-external`, `roll-backends` and `roll-network`, and knows no algorithm and no
//! environment.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod adapter;
mod block;
mod cache;
pub mod chat;
mod check;
mod config;
mod describe;
mod export;
mod generate;
mod gguf;
#[cfg(test)]
mod gguf_tests;
pub mod head;
mod loaded;
mod loading;
mod memory;
mod model;
mod network;
mod packed;
mod pictures;
mod plan;
#[cfg(test)]
mod plan_tests;
mod prefixes;
#[cfg(test)]
mod quantised_tests;
mod reading;
mod sampling;
mod sentencepiece;
mod source;
mod states;

use burn_tensor::{Device, Int, Tensor, TensorData};
pub use roll_network::tokenizer::Tokenizer;

pub use adapter::Module;
pub use block::{rotate_halves, split_rows};
pub use chat::ChatTemplate;
pub use check::missing_beside;
pub use config::LmConfig;
pub use export::Export;
pub use loaded::LoadedModel;
pub use loading::{CausalLmOptions, open, opened};
pub use model::{CausalLm, Origin};
pub use network::Network;
pub use pictures::PictureTokens;
pub use plan::planned;
pub use source::{add_end_of_tokenizer, locate, open_weights, origin, write_built_in};

roll_core::inventory::submit! {
    roll_core::OptionNotes {
        kind: roll_core::Kind::Model,
        name: "causal_lm",
        idle: roll_network::trainable::IDLE_KEYS,
        more: None,
    }
}

roll_core::register! {
    Model, "causal_lm", CausalLmOptions,
    "Language models: Qwen2, Qwen2.5, Qwen3, Llama, Mistral, Gemma 2 and 3, Phi-3",
    |options, context| open(&options, context),
    plan: plan::needs,
}

/// Ids of tokens, or indices of rows, on a device.
fn integers(ids: Vec<i64>, device: &Device) -> Tensor<1, Int> {
    let n = ids.len();
    Tensor::from_data(TensorData::new(ids, [n]), device)
}
