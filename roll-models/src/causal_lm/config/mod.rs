//! The shape of a language model, from its `config.json`.

use std::path::Path;

use roll_core::{Error, Result};
use roll_external::files;
use serde::Deserialize;

/// Architectures that share this implementation.
const KNOWN: [&str; 7] = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3"];

/// Sizes that no model reaches; beyond them a file is wrong or hostile.
const MAX_SIZE: usize = 1 << 24;
/// As many blocks no model has: a list of their weights would take gigabytes.
pub(super) const MAX_LAYERS: usize = 1 << 12;

/// Shape of a decoder-only transformer with RMS norms, rotary positions, grouped-query attention and gated feed-forward
/// layers.
#[derive(Clone, Debug, PartialEq)]
pub struct LmConfig {
    /// Number of token ids.
    pub vocab: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Width inside the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads of queries.
    pub heads: usize,
    /// Attention heads of keys and values; `heads / kv_heads` queries share one.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Added to mean squares under the root.
    pub norm_eps: f64,
    /// Rotary frequencies.
    pub rope: Rope,
    /// Whether the output layer is the embedding.
    pub tied: bool,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether the output of attention has one.
    pub out_bias: bool,
    /// Whether the feed-forward layers have one.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised head by head.
    pub qk_norm: bool,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Ids that end a turn.
    pub end_ids: Vec<u32>,
    /// Attention window of each layer in tokens, the token itself included; `None`: all.
    pub windows: Vec<Option<usize>>,
    /// Rotary frequencies of layers with a window, if they are others.
    pub window_rope: Option<Rope>,
    /// Factor of the products of queries and keys; `1 / sqrt(head_dim)` unless given.
    pub attention_scale: Option<f32>,
    /// Bounds of the scores of attention and of the logits: `x` becomes `bound * tanh(x / bound)`.
    pub softcaps: [Option<f32>; 2],
    /// Factor of the vectors of tokens.
    pub embedding_scale: f64,
    /// Added to the gains of the norms.
    pub gain_offset: f64,
    /// Whether there are norms behind attention and the feed-forward layers too.
    pub output_norms: bool,
    /// Whether q, k and v are one layer, and the two that lead into the feed-forward layers.
    pub fused: bool,
    /// The function of the gate.
    pub gate: Gate,
}

/// The function of the gate of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its tanh form.
    Gelu,
}

impl Default for LmConfig {
    fn default() -> Self {
        Self {
            vocab: 0,
            dim: 0,
            ffn_dim: 0,
            layers: 0,
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            norm_eps: 1e-6,
            rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
            tied: false,
            qkv_bias: false,
            out_bias: false,
            mlp_bias: false,
            qk_norm: false,
            context: 0,
            end_ids: Vec::new(),
            windows: Vec::new(),
            window_rope: None,
            attention_scale: None,
            softcaps: [None; 2],
            embedding_scale: 1.0,
            gain_offset: 0.0,
            output_norms: false,
            fused: false,
            gate: Gate::Silu,
        }
    }
}

/// Rotary frequencies `theta^(-2i/d)`, and how they are changed for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are changed for contexts longer than those of pretraining.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by one factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Each divided by its own factor, as GGUF files have them.
    Factors(Vec<f64>),
    /// As Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high frequencies.
        high: f64,
        /// Context of pretraining.
        original: f64,
    },
    /// YaRN (<https://arxiv.org/abs/2309.00071>, as transformers computes it): low frequencies divided, high ones kept, a
    /// ramp over the pairs between, and cosines and sines scaled.
    Yarn {
        /// What low frequencies are divided by.
        factor: f64,
        /// Pairs that turn as often as this over the context of pretraining are kept.
        fast: f64,
        /// Pairs that turn no more often than this are divided.
        slow: f64,
        /// Context of pretraining.
        original: f64,
        /// Scale of cosines and sines.
        magnitude: f64,
    },
}

/// `config.json` as Hugging Face writes it; other keys are ignored.
#[derive(Deserialize)]
struct File {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    /// Gemma's name of it.
    hidden_activation: Option<String>,
    #[serde(default = "default_eps")]
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<serde_json::Value>,
    /// Theta and scaling together, in newer files.
    rope_parameters: Option<serde_json::Value>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    #[serde(default)]
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    /// `sliding_attention` or `full_attention`, in newer files.
    layer_types: Option<Vec<String>>,
    /// One layer in this many sees all tokens.
    sliding_window_pattern: Option<usize>,
    /// The first layers, which see all tokens.
    max_window_layers: Option<usize>,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
    eos_token_id: Option<Ids>,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    rope_local_base_freq: Option<f64>,
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    use_bidirectional_attention: bool,
}

impl File {
    fn is_gemma(&self) -> bool {
        self.model_type.starts_with("gemma")
    }

    fn gate(&self) -> std::result::Result<Gate, String> {
        let default = if self.is_gemma() { "gelu_pytorch_tanh" } else { "silu" };
        let name = self.hidden_activation.as_deref().or(self.hidden_act.as_deref()).unwrap_or(default);
        match name {
            "silu" => Ok(Gate::Silu),
            "gelu_pytorch_tanh" => Ok(Gate::Gelu),
            other => Err(format!("expected the hidden_act `silu` or `gelu_pytorch_tanh`, found `{other}`")),
        }
    }

    /// How many tokens one sees, layer by layer.
    fn windows(&self) -> std::result::Result<Vec<Option<usize>>, String> {
        // More are refused anyway.
        let layers = self.num_hidden_layers.min(MAX_LAYERS + 1);
        let none = vec![None; layers];
        let qwen = self.model_type.starts_with("qwen");
        if (qwen && !self.use_sliding_window) || self.model_type == "llama" {
            return Ok(none);
        }
        let Some(window) = self.sliding_window else {
            return if qwen { Err("`use_sliding_window` needs the number `sliding_window`".into()) } else { Ok(none) };
        };
        if window == 0 {
            return Err("`sliding_window` is 0; expected at least 1".into());
        }
        let slides = |layer: usize| -> std::result::Result<bool, String> {
            if let Some(types) = &self.layer_types {
                return match types.get(layer).map(String::as_str) {
                    Some("sliding_attention") => Ok(true),
                    Some("full_attention") => Ok(false),
                    found => Err(format!("the type of layer {layer} in `layer_types` is {found:?}")),
                };
            }
            Ok(match self.model_type.as_str() {
                "gemma2" => (layer + 1) % self.sliding_window_pattern.unwrap_or(2).max(1) != 0,
                "gemma3_text" => (layer + 1) % self.sliding_window_pattern.unwrap_or(6).max(1) != 0,
                // What transformers takes without the key.
                _ if qwen => layer >= self.max_window_layers.unwrap_or(28),
                _ => true,
            })
        };
        (0..layers).map(|layer| Ok(slides(layer)?.then_some(window))).collect()
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

#[derive(Deserialize)]
struct GenerationFile {
    eos_token_id: Option<Ids>,
}

fn default_eps() -> f64 {
    1e-6
}

fn default_context() -> usize {
    2048
}

impl From<Ids> for Vec<u32> {
    fn from(ids: Ids) -> Self {
        match ids {
            Ids::One(id) => vec![id],
            Ids::Many(ids) => ids,
        }
    }
}

impl LmConfig {
    /// Reads `config.json`, and the ids that end a turn from `generation_config.json` beside it where there is one.
    pub fn read(file: &Path) -> Result<Self> {
        let bytes = files::read(file, files::MAX_TEXT).map_err(Error::file("read", file))?;
        let mut config = Self::parse(&bytes).map_err(|problem| Error::bad_file(file, problem))?;
        let generation = file.with_file_name("generation_config.json");
        if let Ok(bytes) = files::read(&generation, files::MAX_TEXT) {
            let parsed: GenerationFile =
                serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(&generation, e.to_string()))?;
            if let Some(ids) = parsed.eos_token_id {
                config.end_ids.extend(Vec::from(ids));
                config.end_ids.sort_unstable();
                config.end_ids.dedup();
            }
        }
        Ok(config)
    }

    /// Parses the text of a `config.json`; the error names the fault.
    pub fn parse(json: &[u8]) -> std::result::Result<Self, String> {
        let file: File = serde_json::from_slice(json).map_err(|e| format!("not a model's config.json: {e}"))?;
        if !KNOWN.contains(&file.model_type.as_str()) {
            return Err(format!("the model_type `{}` is not supported; known: {}", file.model_type, KNOWN.join(", ")));
        }
        let (gate, windows, gemma) = (file.gate()?, file.windows()?, file.is_gemma());
        if file.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
            return Err("rotary positions on part of a head (`partial_rotary_factor`) are not supported".into());
        }
        if file.use_bidirectional_attention {
            return Err("`use_bidirectional_attention` is not supported: such a model writes no text".into());
        }
        // The newest files have those of layers with a window apart.
        let apart = |kind: &str| file.rope_parameters.as_ref()?.get(kind).cloned();
        let window_theta = apart("sliding_attention").and_then(|parameters| parameters.get("rope_theta")?.as_f64());
        let scaling = apart("full_attention").or(file.rope_parameters.clone()).or(file.rope_scaling.clone());
        let theta = if file.model_type == "gemma3_text" { 1e6 } else { 1e4 };
        let rope = rope(file.rope_theta, theta, scaling, file.max_position_embeddings)?;
        let mut context = file.max_position_embeddings;
        if let RopeScaling::Yarn { factor, original, .. } = rope.scaling {
            context = context.max((factor * original) as usize);
        }
        let (qwen2, qwen3) = (file.model_type == "qwen2", file.model_type == "qwen3");
        let (gemma2, gemma3) = (file.model_type == "gemma2", file.model_type == "gemma3_text");
        let attention_scale = match file.query_pre_attn_scalar.filter(|_| gemma) {
            Some(scalar) if scalar > 0.0 => Some(scalar.sqrt().recip() as f32),
            Some(scalar) => return Err(format!("`query_pre_attn_scalar` is {scalar}; expected a positive number")),
            // What transformers takes without the key.
            None => gemma.then_some(1.0 / 16.0),
        };
        let softcaps = [file.attn_logit_softcapping, file.final_logit_softcapping].map(|cap| cap.filter(|_| gemma));
        if softcaps.iter().flatten().any(|cap| !(*cap > 0.0 && cap.is_finite())) {
            return Err(format!("logit softcappings {softcaps:?}; expected positive numbers"));
        }
        let attention_bias = file.attention_bias.unwrap_or(false);
        let heads = file.num_attention_heads;
        let config = Self {
            vocab: file.vocab_size,
            dim: file.hidden_size,
            ffn_dim: file.intermediate_size,
            layers: file.num_hidden_layers,
            heads,
            kv_heads: file.num_key_value_heads.unwrap_or(heads),
            head_dim: file.head_dim.unwrap_or(if gemma { 256 } else { file.hidden_size / heads.max(1) }),
            norm_eps: file.rms_norm_eps,
            rope,
            tied: file.tie_word_embeddings.unwrap_or(gemma),
            qkv_bias: qwen2 || attention_bias,
            out_bias: !qwen2 && attention_bias,
            mlp_bias: file.mlp_bias.unwrap_or(false),
            qk_norm: qwen3 || gemma3,
            context,
            end_ids: file.eos_token_id.map(Into::into).unwrap_or_default(),
            windows,
            window_rope: gemma3.then(|| Rope {
                theta: file.rope_local_base_freq.or(window_theta).unwrap_or(10_000.0),
                scaling: RopeScaling::None,
            }),
            attention_scale,
            softcaps,
            embedding_scale: if gemma { (file.hidden_size as f64).sqrt() } else { 1.0 },
            gain_offset: if gemma { 1.0 } else { 0.0 },
            output_norms: gemma2 || gemma3,
            fused: file.model_type == "phi3",
            gate,
        };
        config.check()?;
        Ok(config)
    }

    /// Fails on sizes that no model has, or that contradict one another.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
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
            let most = if name == "num_hidden_layers" { MAX_LAYERS } else { MAX_SIZE };
            if size == 0 || size > most {
                return Err(format!("`{name}` is {size}; expected 1 to {most}"));
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
            return Err(format!("expected {expected} rope factors above 0, found {} numbers", factors.len()));
        }
        if self.windows.len() != self.layers {
            return Err(format!("windows of {} layers for {}", self.windows.len(), self.layers));
        }
        if !(self.norm_eps >= 0.0 && self.rope.theta > 0.0) {
            return Err(format!("rms_norm_eps {} or rope_theta {} is out of range", self.norm_eps, self.rope.theta));
        }
        Ok(())
    }

    /// Name and shape of every weight, in the order of the network. A tied output layer has no weight of its own.
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

    /// The linear layers of a block.
    pub fn linear_layers(&self) -> &'static str {
        match self.fused {
            true => "qkv_proj,o_proj,gate_up_proj,down_proj",
            false => "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        }
    }

    /// Name of the output layer's weight.
    pub fn head_weight(&self) -> &'static str {
        if self.tied { "model.embed_tokens.weight" } else { "lm_head.weight" }
    }
}

fn rope(
    theta: Option<f64>,
    default_theta: f64,
    scaling: Option<serde_json::Value>,
    context: usize,
) -> std::result::Result<Rope, String> {
    let scaling = scaling.unwrap_or_default();
    let number = |key: &str| scaling.get(key).and_then(serde_json::Value::as_f64);
    let needed = |key: &str| match number(key) {
        Some(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err(format!("`rope_scaling` needs a positive number `{key}`")),
    };
    let theta = theta.or_else(|| number("rope_theta")).unwrap_or(default_theta);
    let kind = ["rope_type", "type"].iter().find_map(|key| scaling.get(key)?.as_str()).unwrap_or("default");
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: needed("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: needed("factor")?,
            low: needed("low_freq_factor")?,
            high: needed("high_freq_factor")?,
            original: number("original_max_position_embeddings").unwrap_or(context as f64),
        },
        "yarn" => {
            let factor = needed("factor")?;
            let scale = |weight: f64| if factor > 1.0 { 0.1 * weight * factor.ln() + 1.0 } else { 1.0 };
            let of_weights = number("mscale").zip(number("mscale_all_dim")).filter(|(a, b)| *a != 0.0 && *b != 0.0);
            RopeScaling::Yarn {
                factor,
                fast: number("beta_fast").unwrap_or(32.0),
                slow: number("beta_slow").unwrap_or(1.0),
                original: number("original_max_position_embeddings").unwrap_or(context as f64),
                magnitude: match (number("attention_factor"), of_weights) {
                    (Some(given), _) => given,
                    (None, Some((one, all))) => scale(one) / scale(all),
                    (None, None) => scale(1.0),
                },
            }
        }
        other => {
            return Err(format!("the rope_scaling `{other}` is not supported; known: default, linear, llama3, yarn"));
        }
    };
    Ok(Rope { theta, scaling })
}

impl Rope {
    /// Factor of cosines and sines.
    pub fn magnitude(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { magnitude, .. } => magnitude,
            _ => 1.0,
        }
    }

    /// Angle per position of each pair of a head of width `head_dim`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = (0..head_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / head_dim as f64));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
            RopeScaling::Factors(factors) => plain.zip(factors).map(|(f, factor)| f / factor).collect(),
            &RopeScaling::Llama3 { factor, low, high, original } => plain
                .map(|f| {
                    let turns = original * f / std::f64::consts::TAU;
                    // 0 where the frequency is low, 1 where it is high.
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    f * kept + f / factor * (1.0 - kept)
                })
                .collect(),
            &RopeScaling::Yarn { factor, fast, slow, original, .. } => {
                // The pair that turns `turns` times over the context of pretraining.
                let pair = |turns: f64| {
                    head_dim as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
                };
                let first = pair(fast).floor().max(0.0);
                let last = pair(slow).ceil().min(head_dim as f64 - 1.0);
                let width = if last == first { 0.001 } else { last - first };
                let kept = |i: usize| 1.0 - ((i as f64 - first) / width).clamp(0.0, 1.0);
                plain.enumerate().map(|(i, f)| f * kept(i) + f / factor * (1.0 - kept(i))).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn json(changes: &[(&str, serde_json::Value)]) -> Vec<u8> {
        let mut value = serde_json::json!({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": [3, 5],
        });
        for (key, change) in changes {
            value[*key] = change.clone();
        }
        serde_json::to_vec(&value).unwrap()
    }

    #[test]
    fn the_model_type_decides_biases_and_norms() {
        let of = |kind: &str| LmConfig::parse(&json(&[("model_type", kind.into())])).unwrap();
        assert_eq!((of("llama").qkv_bias, of("llama").qk_norm), (false, false));
        assert_eq!((of("qwen2").qkv_bias, of("qwen2").out_bias), (true, false));
        assert_eq!((of("qwen3").qkv_bias, of("qwen3").qk_norm), (false, true));
        assert_eq!((of("llama").head_dim, of("llama").end_ids), (2, vec![3, 5]));
    }

    #[test]
    fn what_cannot_be_run_is_refused_by_name() {
        for (key, value, word) in [
            ("model_type", serde_json::json!("gpt2"), "gpt2"),
            ("hidden_act", serde_json::json!("gelu"), "gelu"),
            ("partial_rotary_factor", serde_json::json!(0.75), "partial_rotary_factor"),
            ("model_type", serde_json::json!("gemma3"), "gemma3_text"),
            ("num_key_value_heads", serde_json::json!(3), "share"),
            ("num_hidden_layers", serde_json::json!(0), "num_hidden_layers"),
            // The names of all these weights would not fit into memory.
            ("num_hidden_layers", serde_json::json!(1 << 20), "num_hidden_layers"),
            ("vocab_size", serde_json::json!(1u64 << 40), "vocab_size"),
            ("rope_scaling", serde_json::json!({"type": "yarn"}), "factor"),
            ("rope_scaling", serde_json::json!({"type": "longrope"}), "longrope"),
            ("rope_scaling", serde_json::json!({"type": "linear"}), "factor"),
        ] {
            let error = LmConfig::parse(&json(&[(key, value)])).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn layers_have_the_windows_that_their_family_gives_them() {
        let windows = |kind: &str, changes: &[(&str, serde_json::Value)]| {
            let changes = [changes, &[("model_type", kind.into()), ("sliding_window", 512.into())]].concat();
            let config = LmConfig::parse(&json(&changes)).unwrap();
            assert_eq!(config.context, 2048);
            config.windows
        };
        let (all, none) = ([Some(512); 2], [None; 2]);
        assert_eq!(windows("mistral", &[]), all);
        assert_eq!(windows("phi3", &[]), all);
        assert_eq!(windows("qwen2", &[]), none, "there it must be switched on");
        assert_eq!(windows("qwen2", &[("use_sliding_window", true.into())]), none, "but on the first 28 layers");
        let late = [("use_sliding_window", true.into()), ("max_window_layers", 1.into())];
        assert_eq!(windows("qwen2", &late), [None, Some(512)]);
        assert_eq!(windows("gemma2", &[]), [Some(512), None]);
        assert_eq!(windows("gemma3_text", &[]), all);
        let types = serde_json::json!(["full_attention", "sliding_attention"]);
        assert_eq!(windows("gemma3_text", &[("layer_types", types)]), [None, Some(512)]);
        assert_eq!(windows("llama", &[]), none);
    }

    const YARN: [(usize, f64); 6] = [
        (0, 1.0),
        (20, 0.01333521432163324),
        (30, 0.0010643609812470017),
        (35, 0.0002462584069089387),
        (40, 4.445698525097307e-05),
        (63, 3.102344401879299e-07),
    ];

    #[test]
    fn yarn_is_that_of_transformers() {
        let scaling = serde_json::json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        let config = LmConfig::parse(&json(&[
            ("rope_scaling", scaling),
            ("rope_theta", 1_000_000.0.into()),
            ("max_position_embeddings", 32768.into()),
        ]))
        .unwrap();
        assert_eq!(config.context, 131_072);
        assert!((config.rope.magnitude() - 1.138_629_436_111_989).abs() < 1e-12);
        let frequencies = config.rope.frequencies(128);
        // Expected values were computed in Python by the formulas of `_compute_yarn_parameters`.
        for (i, expected) in YARN {
            assert!((frequencies[i] / expected - 1.0).abs() < 1e-12, "{i}: {}, {expected}", frequencies[i]);
        }
    }

    #[test]
    fn factors_that_do_not_fit_the_head_are_refused() {
        let config = LmConfig::parse(&json(&[])).unwrap();
        for (factors, right) in [(vec![2.0], true), (vec![], false), (vec![1.0, 1.0], false), (vec![0.0], false)] {
            let rope = Rope { scaling: RopeScaling::Factors(factors), ..config.rope.clone() };
            assert_eq!(LmConfig { rope, ..config.clone() }.check().is_ok(), right);
        }
    }

    #[test]
    fn llama3_scaling_keeps_high_frequencies_and_divides_low_ones() {
        let scaling = serde_json::json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        let json = json(&[("rope_scaling", scaling), ("rope_theta", 500_000.0.into()), ("head_dim", 64.into())]);
        let rope = LmConfig::parse(&json).unwrap().rope;
        let plain = Rope { theta: 500_000.0, scaling: RopeScaling::None }.frequencies(64);
        let scaled = rope.frequencies(64);
        assert_eq!(scaled[0], plain[0]);
        assert!((scaled[31] - plain[31] / 8.0).abs() < 1e-15);
        assert!(scaled.windows(2).all(|w| w[0] > w[1]));
    }
}
