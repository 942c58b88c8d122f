//! Language models.

use crate::{Adapter, Grad, Pullback, Result, Tensor};

/// How tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// Nucleus mass; 1 keeps everything.
    pub top_p: f64,
    /// Number of likeliest tokens kept; 0 keeps everything.
    pub top_k: usize,
    /// Most new tokens per prompt.
    pub max_new_tokens: usize,
    /// Generation of a row ends after one of these texts.
    pub stop: Vec<String>,
    /// Key of the random draws.
    pub seed: u64,
}

/// One generated continuation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Log-probability of each under the distribution it was drawn from.
    pub log_probs: Vec<f32>,
}

/// Statistics of given tokens, f32 `[B, L - 1]`: position t speaks of token t + 1.
#[derive(Clone, Debug)]
pub struct TokenStats {
    /// Log-probability of the next token.
    pub log_probs: Tensor,
    /// Entropy of the next-token distribution.
    pub entropy: Tensor,
}

/// A causal language model.
pub trait LanguageModel {
    /// Text to tokens.
    fn tokenize(&self, text: &str) -> Result<Vec<u32>>;

    /// Tokens to text.
    fn detokenize(&self, tokens: &[u32]) -> Result<String>;

    /// Continues each prompt.
    fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>>;

    /// Evaluates tokens (i64 `[B, L]`) under `mask` (u8 `[B, L]`). The pullback takes the cotangents of log-probs
    /// and entropy stacked as `[2, B, L - 1]`; its result is empty, since tokens are not differentiable.
    fn evaluate(
        &mut self,
        tokens: &Tensor,
        mask: &Tensor,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)>;
}
