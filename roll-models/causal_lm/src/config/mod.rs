//! The architecture of a language model.
//!
//! [`LmConfig`] holds the sizes and the variants of all supported families. `json` reads it from Hugging Face's
//! `config.json`, `rope` computes the frequencies of rotary positions.

mod json;
mod rope;

pub use rope::{Rope, RopeScaling};

/// Maximal size, such as a width or the vocabulary. A file with a larger size is wrong or hostile.
const MAX_SIZE: usize = 1 << 24;
/// Maximal number of blocks. With more, the names of the weights alone could exhaust the memory.
pub(super) const MAX_LAYERS: usize = 1 << 12;

/// Architecture of a decoder-only transformer with RMS norms, rotary positions, grouped-query attention and gated
/// feed-forward layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LmConfig {
    /// Number of token ids.
    pub vocab: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Hidden width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Number of attention heads of queries.
    pub heads: usize,
    /// Number of attention heads of keys and values. `heads / kv_heads` query heads share one of them.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Epsilon of the RMS norms.
    pub norm_eps: f64,
    /// Rotary frequencies.
    pub rope: Rope,
    /// Whether the output layer shares the weight of the embedding.
    pub tied: bool,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub out_bias: bool,
    /// Whether the feed-forward layers have a bias.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised head by head.
    pub qk_norm: bool,
    /// Maximal number of tokens of a sequence.
    pub context: usize,
    /// Ids of the tokens that end a turn.
    pub end_ids: Vec<u32>,
    /// Attention window of each layer: the number of tokens that a query attends to, including its own token. `None`:
    /// full causal attention.
    pub windows: Vec<Option<usize>>,
    /// Rotary frequencies of layers with a window, if they differ from `rope`.
    pub window_rope: Option<Rope>,
    /// Factor of the products of queries and keys. `None`: `1 / sqrt(head_dim)`.
    pub attention_scale: Option<f32>,
    /// Bound of the attention scores: `x` becomes `bound * tanh(x / bound)`.
    pub attention_softcap: Option<f32>,
    /// Bound of the logits: `x` becomes `bound * tanh(x / bound)`.
    pub logit_softcap: Option<f32>,
    /// Factor of the token embeddings; 1 in most families.
    pub embedding_scale: f64,
    /// Added to the stored gains of the norms: 1 for families that store `gain - 1`, else 0.
    pub gain_offset: f64,
    /// Whether the outputs of attention and of the feed-forward layers are normalised too.
    pub output_norms: bool,
    /// Whether q, k and v are one linear layer, and gate and up another.
    pub fused: bool,
    /// Activation of the gate.
    pub gate: Gate,
}

/// Activation of the gate of a feed-forward layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    #[default]
    Silu,
    /// GELU in its tanh form.
    Gelu,
}

impl LmConfig {
    /// Fails on sizes that are out of range, or that contradict each other.
    pub(super) fn check(&self) -> Result<(), String> {
        let sizes = [
            ("vocab_size", self.vocab),
            ("hidden_size", self.dim),
            ("intermediate_size", self.ffn_dim),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.context),
        ];
        for (name, size) in sizes {
            let max_size = if name == "num_hidden_layers" { MAX_LAYERS } else { MAX_SIZE };
            if size == 0 || size > max_size {
                return Err(format!("`{name}` is {size}; expected 1 to {max_size}"));
            }
        }
        if self.heads % self.kv_heads != 0 {
            return Err(format!("{} query heads cannot share {} key heads", self.heads, self.kv_heads));
        }
        if self.head_dim % 2 != 0 {
            return Err(format!("`head_dim` is {}; rotary positions need an even one", self.head_dim));
        }
        if let RopeScaling::Factors(factors) = &self.rope.scaling
            && (factors.len() != self.head_dim / 2 || !factors.iter().all(|f| *f > 0.0))
        {
            let expected = self.head_dim / 2;
            let positive = factors.iter().filter(|factor| **factor > 0.0).count();
            let found = factors.len();
            return Err(format!(
                "expected {expected} rope factors, all above 0; found {found}, of which {positive} are above 0"
            ));
        }
        if self.windows.len() != self.layers {
            return Err(format!("expected {} attention windows, found {}", self.layers, self.windows.len()));
        }
        if self.norm_eps.is_nan() || self.norm_eps < 0.0 {
            return Err(format!("`rms_norm_eps` is {}; expected a number of at least 0", self.norm_eps));
        }
        if self.rope.theta.is_nan() || self.rope.theta <= 0.0 {
            return Err(format!("`rope_theta` is {}; expected a number above 0", self.rope.theta));
        }
        Ok(())
    }

    /// Returns the Hugging Face name and shape of every weight, in the order of the network. A tied output layer has no
    /// weight of its own.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let mut weights = vec![("model.embed_tokens.weight".to_string(), vec![self.vocab, self.dim])];
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for i in 0..self.layers {
            let mut add =
                |name: &str, shape: &[usize]| weights.push((format!("model.layers.{i}.{name}"), shape.to_vec()));
            let mut linear = |name: &str, out: usize, input: usize, bias: bool| {
                add(&format!("{name}.weight"), &[out, input]);
                if bias {
                    add(&format!("{name}.bias"), &[out]);
                }
            };
            if self.fused {
                linear("self_attn.qkv_proj", q + 2 * kv, self.dim, self.qkv_bias);
                linear("self_attn.o_proj", self.dim, q, self.out_bias);
                linear("mlp.gate_up_proj", 2 * self.ffn_dim, self.dim, self.mlp_bias);
            } else {
                linear("self_attn.q_proj", q, self.dim, self.qkv_bias);
                linear("self_attn.k_proj", kv, self.dim, self.qkv_bias);
                linear("self_attn.v_proj", kv, self.dim, self.qkv_bias);
                linear("self_attn.o_proj", self.dim, q, self.out_bias);
                linear("mlp.gate_proj", self.ffn_dim, self.dim, self.mlp_bias);
                linear("mlp.up_proj", self.ffn_dim, self.dim, self.mlp_bias);
            }
            linear("mlp.down_proj", self.dim, self.ffn_dim, self.mlp_bias);
            if self.qk_norm {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
            add("input_layernorm.weight", &[self.dim]);
            add("post_attention_layernorm.weight", &[self.dim]);
            if self.output_norms {
                add("pre_feedforward_layernorm.weight", &[self.dim]);
                add("post_feedforward_layernorm.weight", &[self.dim]);
            }
        }
        weights.push(("model.norm.weight".into(), vec![self.dim]));
        if !self.tied {
            weights.push(("lm_head.weight".into(), vec![self.vocab, self.dim]));
        }
        weights
    }

    /// Returns the names of the linear layers of a block, separated by commas, as in
    /// `lora_target_modules`.
    pub fn linear_layers(&self) -> &'static str {
        if self.fused {
            "qkv_proj,o_proj,gate_up_proj,down_proj"
        } else {
            "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
        }
    }

    /// Returns the name of the output layer's weight.
    pub fn head_weight(&self) -> &'static str {
        if self.tied { "model.embed_tokens.weight" } else { "lm_head.weight" }
    }
}
