//! The shape of a language model, from its `config.json`.

use std::path::Path;

use roll_core::{Error, Result, files};
use serde::Deserialize;

/// Architectures that share this implementation. They differ in biases and norms, which the weights themselves tell.
const KNOWN: [&str; 4] = ["qwen2", "qwen3", "llama", "mistral"];

/// Sizes that no model reaches; beyond them a file is wrong or hostile.
const MAX_SIZE: usize = 1 << 24;
/// As many blocks no model has: a list of their weights would take gigabytes.
const MAX_LAYERS: usize = 1 << 12;

/// Shape of a decoder-only transformer with RMS norms, rotary positions, grouped-query attention and SwiGLU.
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
    /// Most tokens of a sequence. Of a model with sliding-window attention the window: within it every token sees all
    /// before it, as here.
    pub context: usize,
    /// Ids that end a turn.
    pub end_ids: Vec<u32>,
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

/// `config.json` as Hugging Face writes it; what does not matter here is ignored.
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
    #[serde(default = "silu")]
    hidden_act: String,
    #[serde(default = "default_eps")]
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<serde_json::Value>,
    /// What newer files call theta and scaling together.
    rope_parameters: Option<serde_json::Value>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    #[serde(default)]
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
    eos_token_id: Option<Ids>,
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

fn silu() -> String {
    "silu".into()
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

    /// Parses the text of a `config.json`; the error says what is wrong with it.
    pub fn parse(json: &[u8]) -> std::result::Result<Self, String> {
        let file: File = serde_json::from_slice(json).map_err(|e| format!("not a model's config.json: {e}"))?;
        if !KNOWN.contains(&file.model_type.as_str()) {
            return Err(format!("the model_type `{}` is not supported; known: {}", file.model_type, KNOWN.join(", ")));
        }
        if file.hidden_act != "silu" {
            return Err(format!("expected the hidden_act `silu`, found `{}`", file.hidden_act));
        }
        let rope = rope(file.rope_theta, file.rope_parameters.or(file.rope_scaling), file.max_position_embeddings)?;
        let mut context = file.max_position_embeddings;
        if let RopeScaling::Yarn { factor, original, .. } = rope.scaling {
            context = context.max((factor * original) as usize);
        }
        // Mistral has no switch: a window that is named is used.
        if file.use_sliding_window || file.model_type == "mistral" {
            context = match (file.sliding_window, file.use_sliding_window) {
                (Some(window), _) => context.min(window),
                (None, true) => return Err("`use_sliding_window` needs the number `sliding_window`".into()),
                (None, false) => context,
            };
        }
        let (qwen2, qwen3) = (file.model_type == "qwen2", file.model_type == "qwen3");
        let attention_bias = file.attention_bias.unwrap_or(false);
        let heads = file.num_attention_heads;
        let config = Self {
            vocab: file.vocab_size,
            dim: file.hidden_size,
            ffn_dim: file.intermediate_size,
            layers: file.num_hidden_layers,
            heads,
            kv_heads: file.num_key_value_heads.unwrap_or(heads),
            head_dim: file.head_dim.unwrap_or(file.hidden_size / heads.max(1)),
            norm_eps: file.rms_norm_eps,
            rope,
            tied: file.tie_word_embeddings.unwrap_or(false),
            qkv_bias: qwen2 || attention_bias,
            out_bias: !qwen2 && attention_bias,
            mlp_bias: file.mlp_bias.unwrap_or(false),
            qk_norm: qwen3,
            context,
            end_ids: file.eos_token_id.map(Into::into).unwrap_or_default(),
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
        if !(self.norm_eps >= 0.0 && self.rope.theta > 0.0) {
            return Err(format!("rms_norm_eps {} or rope_theta {} is out of range", self.norm_eps, self.rope.theta));
        }
        Ok(())
    }

    /// Name and shape of every weight, in the order of the network. A tied output layer is none.
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
            linear("self_attn.q_proj", q, self.dim, self.qkv_bias);
            linear("self_attn.k_proj", kv, self.dim, self.qkv_bias);
            linear("self_attn.v_proj", kv, self.dim, self.qkv_bias);
            linear("self_attn.o_proj", self.dim, q, self.out_bias);
            linear("mlp.gate_proj", self.ffn_dim, self.dim, self.mlp_bias);
            linear("mlp.up_proj", self.ffn_dim, self.dim, self.mlp_bias);
            linear("mlp.down_proj", self.dim, self.ffn_dim, self.mlp_bias);
            if self.qk_norm {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
            add("input_layernorm.weight", &[self.dim]);
            add("post_attention_layernorm.weight", &[self.dim]);
        }
        weights.push(("model.norm.weight".into(), vec![self.dim]));
        if !self.tied {
            weights.push(("lm_head.weight".into(), vec![self.vocab, self.dim]));
        }
        weights
    }

    /// Name of the output layer's weight.
    pub fn head_weight(&self) -> &'static str {
        if self.tied { "model.embed_tokens.weight" } else { "lm_head.weight" }
    }
}

fn rope(theta: Option<f64>, scaling: Option<serde_json::Value>, context: usize) -> std::result::Result<Rope, String> {
    let scaling = scaling.unwrap_or_default();
    let number = |key: &str| scaling.get(key).and_then(serde_json::Value::as_f64);
    let needed = |key: &str| match number(key) {
        Some(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err(format!("`rope_scaling` needs a positive number `{key}`")),
    };
    let theta = theta.or_else(|| number("rope_theta")).unwrap_or(10_000.0);
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
    /// What cosines and sines are multiplied by.
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
            ("use_sliding_window", serde_json::json!(true), "`sliding_window`"),
            ("num_key_value_heads", serde_json::json!(3), "share"),
            ("num_hidden_layers", serde_json::json!(0), "num_hidden_layers"),
            // Names of so many weights would not fit into memory.
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
    fn the_window_of_sliding_attention_is_the_longest_sequence() {
        let context = |changes: &[(&str, serde_json::Value)]| LmConfig::parse(&json(changes)).unwrap().context;
        let window = || ("sliding_window", serde_json::json!(512));
        assert_eq!(context(&[("model_type", "mistral".into()), window()]), 512);
        assert_eq!(context(&[("model_type", "mistral".into()), ("sliding_window", serde_json::Value::Null)]), 2048);
        assert_eq!(context(&[("model_type", "qwen2".into()), window()]), 2048, "there it must be switched on");
        assert_eq!(context(&[("use_sliding_window", true.into()), window()]), 512);
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
        // By the formulas of `_compute_yarn_parameters`, in Python.
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
