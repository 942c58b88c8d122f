//! Language models.

use crate::{Adapter, Error, Grad, Picture, Pullback, Result, Tensor};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// The text.
    pub content: String,
    /// Further fields that a chat template may read, such as `tool_calls`.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, serde_json::Value>,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), fields: serde_json::Map::new() }
    }
}

/// How tokens are drawn.
///
/// The answer to a prompt depends on the prompt, its number and the seed, never on the other prompts.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Sampling {
    /// Divisor of the logits; 0 is greedy.
    #[serde(with = "crate::number")]
    pub temperature: f64,
    /// Probability mass of the likeliest tokens that are kept (nucleus sampling); 1 keeps all tokens.
    #[serde(with = "crate::number")]
    pub top_p: f64,
    /// Number of likeliest tokens that are kept; 0 keeps all tokens.
    pub top_k: usize,
    /// Maximum number of new tokens per prompt.
    pub max_new_tokens: usize,
    /// Maximum number of new tokens of each prompt, if prompts have limits of their own below `max_new_tokens`;
    /// otherwise empty.
    #[serde(default)]
    pub limits: Vec<usize>,
    /// Generation of a row ends after one of these texts.
    #[serde(default)]
    pub stop: Vec<String>,
    /// Key of the random draws.
    pub seed: u64,
    /// The number of each prompt among all prompts that are continued with this seed. Draws depend on this number, so
    /// that the draws for a prompt are the same on any rank and in any batch. Empty: the prompts are numbered from 0.
    #[serde(default)]
    pub numbers: Vec<u64>,
    /// Whether no later call continues these prompts and answers, so that a model keeps nothing of them between calls.
    /// Draws do not depend on it.
    #[serde(default)]
    pub is_last_turn: bool,
}

impl Sampling {
    /// Always draws the likeliest token, at most `max_new_tokens` times.
    pub fn greedy(max_new_tokens: usize) -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            max_new_tokens,
            limits: Vec::new(),
            stop: Vec::new(),
            seed: 0,
            numbers: Vec::new(),
            is_last_turn: false,
        }
    }

    /// Fails on settings that no token can be drawn with. The error's key is the name of a field; the caller adds its
    /// section.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            let problem = format!("expected a number of at least 0, found {}", self.temperature);
            return Err(Error::config("temperature", problem));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::config("top_p", format!("expected a number in (0, 1], found {}", self.top_p)));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::config("stop", "an empty text would stop at once"));
        }
        Ok(())
    }

    /// Maximum number of new tokens of prompt `index` of a call.
    pub fn limit(&self, index: usize) -> usize {
        self.limits.get(index).map_or(self.max_new_tokens, |limit| self.max_new_tokens.min(*limit))
    }

    /// Number of prompt `index` of a call.
    pub fn number(&self, index: usize) -> u64 {
        self.numbers.get(index).copied().unwrap_or(index as u64)
    }
}

/// One generated continuation.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Generation {
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Log-probability of each under the distribution it was drawn from: after temperature, `top_k` and `top_p`.
    #[serde(with = "crate::carried::list")]
    pub log_probs: Vec<f32>,
    /// Log-probability of each at temperature 1 over all tokens, as [`LanguageModel::evaluate`] computes it. Empty if
    /// the model does not provide it.
    #[serde(default, with = "crate::carried::list")]
    pub raw_log_probs: Vec<f32>,
}

/// Statistics of given tokens, f32 `[B, L - 1]`: position t describes token t + 1. 0 where they were not wanted.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct TokenStats {
    /// Log-probability of the next token.
    pub log_probs: Tensor,
    /// Entropy of the next-token distribution.
    pub entropy: Tensor,
}

/// A causal language model.
pub trait LanguageModel {
    /// Converts text to tokens.
    fn tokenize(&self, text: &str) -> Result<Vec<u32>>;

    /// Converts a text to tokens, in which each [`PICTURE_MARK`](crate::PICTURE_MARK) is the place of the next of
    /// `pictures`. A picture's tokens have ids from [`FIRST_PICTURE_ID`](crate::FIRST_PICTURE_ID) on, which are made from
    /// its content: equal pictures have equal tokens in all ranks and runs. The other methods accept these tokens until
    /// [`Self::forget_pictures`] drops their pictures. Fails if marks and pictures are not equally many, or if the model
    /// reads no pictures.
    fn tokenize_with_pictures(&self, text: &str, pictures: &[Picture]) -> Result<Vec<u32>> {
        match pictures {
            [] => self.tokenize(text),
            _ => Err(Error::Unsupported(
                "this language model reads no pictures, and the environment shows some: choose a model that does, such as \
                 `qwen_vl`"
                    .into(),
            )),
        }
    }

    /// Forgets the pictures that no call of [`Self::tokenize_with_pictures`] has had since the previous call of this
    /// method. Snapshots share the pictures of their model.
    fn forget_pictures(&self) {}

    /// Converts tokens to text. A picture's tokens are one [`PICTURE_MARK`](crate::PICTURE_MARK).
    fn detokenize(&self, tokens: &[u32]) -> Result<String>;

    /// A conversation as the model's chat template writes it. With `continue_as_assistant`, the text ends with the
    /// beginning of an assistant's message, so that the model speaks next.
    fn render_chat(&self, _messages: &[Message], _continue_as_assistant: bool) -> Result<String> {
        Err(Error::Unsupported("this model has no chat template".into()))
    }

    /// As [`LanguageModel::render_chat`], with descriptions of tools that the model may call: objects `{"type":
    /// "function", "function": {"name", "description", "parameters"}}`. Their results are messages of the role `tool`.
    /// `None`: the chat template knows no tools.
    fn render_chat_with_tools(
        &self,
        _messages: &[Message],
        _tools: &[serde_json::Value],
        _continue_as_assistant: bool,
    ) -> Result<Option<String>> {
        Ok(None)
    }

    /// Ids after which generation of a row ends.
    fn end_tokens(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Maximum number of tokens of a sequence, prompt and continuation together.
    fn context_length(&self) -> usize {
        usize::MAX
    }

    /// Continues each prompt.
    fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>>;

    /// A snapshot of the policy, separate from the model: it generates on another thread while the model is
    /// updated. It shares the frozen weights and has a copy of the trained ones. Models of plugins have no snapshots.
    fn snapshot(&self) -> Result<Box<dyn LanguageModel + Send>> {
        Err(Error::Unsupported("this language model cannot generate while it is updated".into()))
    }

    /// Hidden states after the last layer's norm, f32 `[B, L, D]`, 0 at padding. The state at position t depends on
    /// tokens 0 to t. Parts that learn on top of the model, such as a critic, read the states. No gradient flows
    /// through them.
    fn hidden_states(&mut self, _tokens: &Tensor, _mask: &Tensor, _adapter: Adapter) -> Result<Tensor> {
        Err(Error::Unsupported("this language model does not give its hidden states, which a critic reads".into()))
    }

    /// Evaluates tokens (i64 `[B, L]`) under `mask` (u8 `[B, L]`, 0 at padding). The statistics of the tokens of
    /// `wanted` (u8 `[B, L]`) are computed, and those of other tokens are 0; `mask` as `wanted` computes all. The first
    /// token of a row has no statistics. The output layer, which costs most in a small model with a large vocabulary,
    /// works on the wanted tokens alone.
    ///
    /// The pullback takes the cotangents of log-probs and entropy stacked as `[2, B, L - 1]`, and ignores those of
    /// tokens that are not wanted. Its result is empty, since tokens are not differentiable.
    fn evaluate(
        &mut self,
        tokens: &Tensor,
        mask: &Tensor,
        wanted: &Tensor,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)>;
}
