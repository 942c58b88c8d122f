//! Text features of prompts ([`Prompts`]). Prompts that a run will need are encoded together, because an encoder streams
//! its weights once per batch.

use std::collections::BTreeMap;

use roll_core::{Result, Tensor};

/// Number of prompts per batch. UMT5-XXL streams its 11 GB of weights once for a batch; an embedding computed ahead of
/// its use takes at most 8 MB.
pub const BATCH: usize = 32;

/// The prompts that will be needed, and features that were computed ahead of their use.
#[derive(Default)]
pub struct Prompts {
    /// Prompts that will be needed.
    expected: Vec<String>,
    /// Features without padding, by prompt.
    ready: BTreeMap<String, Tensor>,
}

impl Prompts {
    /// Replaces the prompts that will be needed; see [`roll_core::DiffusionModel::expect_prompts`].
    pub fn expect(&mut self, prompts: &[String]) {
        self.expected = prompts.to_vec();
    }

    /// Whether `prompt` was not announced or encoded before.
    pub fn is_new(&self, prompt: &String) -> bool {
        !self.expected.contains(prompt) && !self.ready.contains_key(prompt)
    }

    /// Prompts whose features are ready.
    pub fn ready(&self) -> impl Iterator<Item = &str> {
        self.ready.keys().map(String::as_str)
    }

    /// Returns the features of `prompt`. If they are not ready, `encode` encodes it in one batch with expected prompts
    /// and returns the features of each.
    pub fn features(&mut self, prompt: &str, encode: impl FnOnce(&[String]) -> Result<Vec<Tensor>>) -> Result<Tensor> {
        if let Some(features) = self.ready.get(prompt) {
            return Ok(features.clone());
        }
        let mut batch = vec![prompt.to_string()];
        for other in &self.expected {
            if batch.len() < BATCH && !batch.contains(other) && !self.ready.contains_key(other) {
                batch.push(other.clone());
            }
        }
        let features = encode(&batch)?;
        self.ready.retain(|prompt, _| self.expected.contains(prompt));
        self.ready.extend(batch.into_iter().zip(features));
        Ok(self.ready[prompt].clone())
    }
}
