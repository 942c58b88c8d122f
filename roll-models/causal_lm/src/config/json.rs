//! Reads an [`LmConfig`] from a `config.json` of Hugging Face, and writes it as one.

use std::path::Path;

use roll_core::{Error, Result};
use roll_external::files;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Gate, LmConfig, MAX_LAYERS, Rope, RopeScaling};

/// Supported values of `model_type`.
const KNOWN: [&str; 7] = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3"];

/// Types of layers in `layer_types`: with full attention, and with a window.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Keys of a `config.json`; others are ignored.
#[derive(Deserialize)]
struct ConfigFile {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    /// Gemma's name of `hidden_act`.
    hidden_activation: Option<String>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<serde_json::Value>,
    /// Theta and scaling together, in newer files.
    rope_parameters: Option<serde_json::Value>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    sliding_window: Option<usize>,
    /// `sliding_attention` or `full_attention`, in newer files.
    layer_types: Option<Vec<String>>,
    /// Every layer whose number (from 1) is a multiple of this has full attention.
    sliding_window_pattern: Option<usize>,
    /// Number of layers, from the first on, with full attention.
    max_window_layers: Option<usize>,
    max_position_embeddings: Option<usize>,
    eos_token_id: Option<Ids>,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    rope_local_base_freq: Option<f64>,
    partial_rotary_factor: Option<f64>,
    use_bidirectional_attention: Option<bool>,
}

impl ConfigFile {
    fn is_gemma(&self) -> bool {
        self.model_type.starts_with("gemma")
    }

    /// Returns the activation of the gate.
    fn gate(&self) -> Result<Gate, String> {
        let default = if self.is_gemma() { "gelu_pytorch_tanh" } else { "silu" };
        match self.hidden_activation.as_deref().or(self.hidden_act.as_deref()).unwrap_or(default) {
            "silu" => Ok(Gate::Silu),
            "gelu_pytorch_tanh" => Ok(Gate::Gelu),
            other => Err(format!("expected the hidden_act `silu` or `gelu_pytorch_tanh`, found `{other}`")),
        }
    }

    /// Returns the attention window of each layer.
    fn windows(&self) -> Result<Vec<Option<usize>>, String> {
        // `LmConfig::check` rejects more than MAX_LAYERS.
        let layers = self.num_hidden_layers.min(MAX_LAYERS + 1);
        let no_windows = vec![None; layers];
        let is_qwen = self.model_type.starts_with("qwen");
        if (is_qwen && !self.use_sliding_window.unwrap_or(false)) || self.model_type == "llama" {
            return Ok(no_windows);
        }
        match self.sliding_window {
            None if is_qwen => Err("`use_sliding_window` needs the number `sliding_window`".into()),
            None => Ok(no_windows),
            Some(0) => Err("`sliding_window` is 0; expected at least 1".into()),
            Some(window) => (0..layers).map(|layer| Ok(self.has_window(layer)?.then_some(window))).collect(),
        }
    }

    /// Returns whether a layer (from 0) of a model with sliding attention has a window.
    fn has_window(&self, layer: usize) -> Result<bool, String> {
        if let Some(types) = &self.layer_types {
            return match types.get(layer).map(String::as_str) {
                Some(SLIDING) => Ok(true),
                Some(FULL) => Ok(false),
                found => Err(format!("the type of layer {layer} in `layer_types` is {found:?}")),
            };
        }
        // The defaults are those of transformers.
        let pattern = |default: usize| self.sliding_window_pattern.unwrap_or(default).max(1);
        Ok(match self.model_type.as_str() {
            "gemma2" => !(layer + 1).is_multiple_of(pattern(2)),
            "gemma3_text" => !(layer + 1).is_multiple_of(pattern(6)),
            // The first layers have full attention.
            "qwen2" | "qwen3" => layer >= self.max_window_layers.unwrap_or(28),
            // All layers have windows.
            _ => true,
        })
    }

    /// Returns the rotary frequencies of layers with full attention. `context` is the context of pretraining.
    fn rope(&self, context: usize) -> Result<Rope, String> {
        let default_theta = if self.model_type == "gemma3_text" { 1e6 } else { 1e4 };
        let parameters = self.nested_rope()?.or(self.rope_parameters.as_ref());
        let (key, parameters) = match (&self.rope_scaling, parameters) {
            (Some(scaling), Some(parameters)) if scaling != parameters => {
                return Err("`rope_scaling` and `rope_parameters` differ: remove one of them".into());
            }
            (Some(scaling), _) => ("rope_scaling", scaling),
            (None, Some(parameters)) => ("rope_parameters", parameters),
            (None, None) => ("rope_scaling", &Value::Null),
        };
        Rope::parse(key, parameters, self.rope_theta, default_theta, context)
    }

    /// Returns the rotary frequencies of layers with a window, if the file has them apart.
    fn window_rope(&self, context: usize) -> Result<Option<Rope>, String> {
        let is_gemma3 = self.model_type == "gemma3_text";
        let parameters = self.rope_parameters_of(SLIDING);
        if parameters.is_none() && !is_gemma3 {
            return Ok(None);
        }
        // The `rope_theta` of Gemma 3 is that of layers with full attention.
        let shared_theta = if is_gemma3 { None } else { self.rope_theta };
        let theta = self.rope_local_base_freq.or(shared_theta);
        let parameters = parameters.unwrap_or(&Value::Null);
        Rope::parse("rope_parameters.sliding_attention", parameters, theta, 10_000.0, context).map(Some)
    }

    /// Returns the rotary parameters of layers with full attention, if `rope_parameters` has an object for each type of
    /// layer.
    fn nested_rope(&self) -> Result<Option<&Value>, String> {
        let Some(Value::Object(parameters)) = &self.rope_parameters else { return Ok(None) };
        if !parameters.values().any(Value::is_object) {
            return Ok(None);
        }
        if let Some(key) = parameters.keys().find(|key| ![FULL, SLIDING].contains(&key.as_str())) {
            return Err(format!("`rope_parameters`: expected `{FULL}` and `{SLIDING}`, found `{key}`"));
        }
        Ok(Some(parameters.get(FULL).unwrap_or(&Value::Null)))
    }

    /// Returns the rotary parameters of one type of layer, if `rope_parameters` has an object for each type.
    fn rope_parameters_of(&self, layer_type: &str) -> Option<&Value> {
        self.rope_parameters.as_ref()?.get(layer_type)
    }

    /// Returns the factor of the products of queries and keys; see [`LmConfig::attention_scale`].
    fn attention_scale(&self) -> Result<Option<f32>, String> {
        if !self.is_gemma() {
            return Ok(None);
        }
        match self.query_pre_attn_scalar {
            Some(scalar) if scalar > 0.0 => Ok(Some(scalar.sqrt().recip() as f32)),
            Some(scalar) => Err(format!("`query_pre_attn_scalar` is {scalar}; expected a positive number")),
            // The default of transformers is a scalar of 256.
            None => Ok(Some(1.0 / 16.0)),
        }
    }

    /// Checks the softcap `bound`, the value of `key`, and returns it. Families other than Gemma ignore the key.
    fn softcap(&self, key: &str, bound: Option<f32>) -> Result<Option<f32>, String> {
        if !self.is_gemma() {
            return Ok(None);
        }
        match bound {
            Some(bound) if !(bound > 0.0 && bound.is_finite()) => {
                Err(format!("`{key}` is {bound}; expected a positive number"))
            }
            bound => Ok(bound),
        }
    }
}

/// Removes the keys whose value is null. transformers writes such keys; they mean the default, like absent keys.
fn remove_nulls(json: &mut Value) {
    if let Value::Object(fields) = json {
        fields.retain(|_, value| !value.is_null());
        fields.values_mut().for_each(remove_nulls);
    }
}

/// Ids of tokens: a number or a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

/// The keys of a `generation_config.json` that are read.
#[derive(Deserialize)]
struct GenerationFile {
    eos_token_id: Option<Ids>,
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
    /// Reads a `config.json`, and further ids that end a turn from the `generation_config.json` next to it, if it
    /// exists.
    pub fn read(file: &Path) -> Result<Self> {
        let bytes = files::read_filled(file, files::MAX_TEXT).map_err(Error::file("read", file))?;
        let mut config = Self::parse(&bytes).map_err(|problem| Error::bad_file(file, problem))?;
        config.read_generation(file)?;
        Ok(config)
    }

    /// Adds the ids that end a turn by the `generation_config.json` next to `file`, if it exists.
    pub fn read_generation(&mut self, file: &Path) -> Result<()> {
        let generation = file.with_file_name("generation_config.json");
        if let Ok(bytes) = files::read_text_bytes(&generation, files::MAX_TEXT) {
            let parsed: GenerationFile =
                serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(&generation, e.to_string()))?;
            if let Some(ids) = parsed.eos_token_id {
                self.add_end_ids(ids.into());
            }
        }
        Ok(())
    }

    /// Adds ids of tokens that end a turn.
    pub fn add_end_ids(&mut self, ids: Vec<u32>) {
        self.end_ids.extend(ids);
        self.end_ids.sort_unstable();
        self.end_ids.dedup();
    }

    /// Parses the text of a `config.json`.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let not_a_config = |e: serde_json::Error| format!("not a model's config.json: {e}");
        let mut json: Value = serde_json::from_slice(json).map_err(not_a_config)?;
        remove_nulls(&mut json);
        let file: ConfigFile = serde_json::from_value(json).map_err(not_a_config)?;
        if !KNOWN.contains(&file.model_type.as_str()) {
            return Err(format!("the model_type `{}` is not supported; known: {}", file.model_type, KNOWN.join(", ")));
        }
        if file.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
            return Err("rotary positions on part of a head (`partial_rotary_factor`) are not supported".into());
        }
        if file.use_bidirectional_attention.unwrap_or(false) {
            return Err("`use_bidirectional_attention` is not supported: such a model writes no text".into());
        }
        let declared_context = file.max_position_embeddings.unwrap_or(2048);
        let [qwen2, qwen3, gemma2, gemma3, phi3] =
            ["qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"].map(|name| file.model_type == name);
        let gemma = file.is_gemma();
        let mut context = declared_context;
        let rope = file.rope(declared_context)?;
        // YaRN multiplies the context of pretraining.
        if let RopeScaling::Yarn { factor, original, .. } = rope.scaling {
            context = context.max((factor * original) as usize);
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
            norm_eps: file.rms_norm_eps.unwrap_or(1e-6),
            rope,
            tied: file.tie_word_embeddings.unwrap_or(gemma),
            qkv_bias: qwen2 || attention_bias,
            out_bias: !qwen2 && attention_bias,
            mlp_bias: file.mlp_bias.unwrap_or(false),
            qk_norm: qwen3 || gemma3,
            context,
            windows: file.windows()?,
            window_rope: file.window_rope(declared_context)?,
            attention_scale: file.attention_scale()?,
            attention_softcap: file.softcap("attn_logit_softcapping", file.attn_logit_softcapping)?,
            logit_softcap: file.softcap("final_logit_softcapping", file.final_logit_softcapping)?,
            embedding_scale: if gemma { (file.hidden_size as f64).sqrt() } else { 1.0 },
            gain_offset: if gemma { 1.0 } else { 0.0 },
            output_norms: gemma2 || gemma3,
            fused: phi3,
            gate: file.gate()?,
            end_ids: file.eos_token_id.map(Into::into).unwrap_or_default(),
        };
        config.check()?;
        Ok(config)
    }

    /// Returns the `config.json` of a model of this architecture. `family` is the architecture's name in GGUF. Fails on
    /// an architecture that a `config.json` cannot express.
    pub fn to_json(&self, family: &str) -> Result<Value, String> {
        let (model_type, class) = match family {
            "qwen2" => ("qwen2", "Qwen2ForCausalLM"),
            "qwen3" => ("qwen3", "Qwen3ForCausalLM"),
            "gemma2" => ("gemma2", "Gemma2ForCausalLM"),
            "gemma3" => ("gemma3_text", "Gemma3ForCausalLM"),
            "phi3" => ("phi3", "Phi3ForCausalLM"),
            _ => ("llama", "LlamaForCausalLM"),
        };
        let mut json = json!({
            "architectures": [class], "model_type": model_type, "torch_dtype": "float32",
            "vocab_size": self.vocab, "hidden_size": self.dim, "intermediate_size": self.ffn_dim,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "rms_norm_eps": self.norm_eps, "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.scaling_json(self.head_dim)?, "tie_word_embeddings": self.tied,
            "attention_bias": self.out_bias, "mlp_bias": self.mlp_bias, "max_position_embeddings": self.context,
            "eos_token_id": self.end_ids,
        });
        let activation = if self.gate == Gate::Gelu { "gelu_pytorch_tanh" } else { "silu" };
        let activation_key = if model_type.starts_with("gemma") { "hidden_activation" } else { "hidden_act" };
        json[activation_key] = activation.into();
        if let Some(window) = self.windows.iter().flatten().next() {
            json["sliding_window"] = json!(window);
            let layer_type = |window: &Option<usize>| if window.is_some() { SLIDING } else { FULL };
            json["layer_types"] = self.windows.iter().map(layer_type).collect();
        }
        if let Some(scale) = self.attention_scale {
            json["query_pre_attn_scalar"] = json!(f64::from(scale).powi(-2).round());
            json["attn_logit_softcapping"] = json!(self.attention_softcap);
            json["final_logit_softcapping"] = json!(self.logit_softcap);
        }
        if let Some(rope) = &self.window_rope {
            json["rope_local_base_freq"] = json!(rope.theta);
        }
        // Reading the result must return this architecture. The rotary factors of GGUF are written as a rule, which
        // `scaling_json` has compared.
        let read = Self::parse(json.to_string().as_bytes())?;
        if (Self { rope: self.rope.clone(), ..read }) != *self {
            return Err(format!("a config.json of the model_type `{model_type}` cannot express its architecture"));
        }
        Ok(json)
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    pub fn json(changes: &[(&str, serde_json::Value)]) -> Vec<u8> {
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
    fn model_type_determines_biases_and_norms() {
        let of = |kind: &str| LmConfig::parse(&json(&[("model_type", kind.into())])).unwrap();
        assert_eq!((of("llama").qkv_bias, of("llama").qk_norm), (false, false));
        assert_eq!((of("qwen2").qkv_bias, of("qwen2").out_bias), (true, false));
        assert_eq!((of("qwen3").qkv_bias, of("qwen3").qk_norm), (false, true));
        assert_eq!((of("llama").head_dim, of("llama").end_ids), (2, vec![3, 5]));
    }

    #[test]
    fn rejects_unsupported_models_by_key() {
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
    fn null_is_an_absent_key_in_every_family() {
        let optional = [
            "head_dim",
            "hidden_act",
            "hidden_activation",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "use_sliding_window",
            "sliding_window",
            "layer_types",
            "sliding_window_pattern",
            "max_window_layers",
            "max_position_embeddings",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "rope_local_base_freq",
            "partial_rotary_factor",
            "use_bidirectional_attention",
            "pad_token_id",
        ];
        for family in KNOWN {
            let plain = LmConfig::parse(&json(&[("model_type", family.into())])).unwrap();
            let mut nulls: Vec<_> = optional.map(|key| (key, Value::Null)).to_vec();
            nulls.push(("model_type", family.into()));
            assert_eq!(LmConfig::parse(&json(&nulls)).unwrap(), plain, "{family}");
            let within = serde_json::json!({"rope_type": "default", "factor": null, "rope_theta": null, "rope": null});
            let within = [("model_type", family.into()), ("rope_parameters", within)];
            assert_eq!(LmConfig::parse(&json(&within)).unwrap(), plain, "{family}");
        }
    }

    #[test]
    fn rope_parameters_are_computed_or_refused_by_name() {
        let parsed = |family: &str, parameters: Value| {
            LmConfig::parse(&json(&[("model_type", family.into()), ("rope_parameters", parameters)]))
        };
        for (parameters, words) in [
            (serde_json::json!({"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
            (serde_json::json!({"rope_type": "longrope", "long_factor": [1.0]}), "longrope"),
            (serde_json::json!({"rope_type": "default", "mrope_section": [1, 1]}), "mrope_section"),
            (serde_json::json!({"full_attention": {"rope_type": "dynamic", "factor": 2.0}}), "dynamic"),
            (serde_json::json!({"sliding_attention": {"rope_type": "proportional"}}), "proportional"),
            (serde_json::json!({"chunked_attention": {"rope_type": "default"}}), "chunked_attention"),
            (serde_json::json!({"rope_type": "linear"}), "factor"),
            (serde_json::json!({"rope_type": "linear", "factor": "2"}), "factor"),
        ] {
            for family in ["llama", "qwen3", "gemma3_text"] {
                let problem = parsed(family, parameters.clone()).unwrap_err();
                assert!(problem.contains(words), "{family}: {problem}");
            }
        }
        let theta = parsed("llama", serde_json::json!({"rope_type": "default", "rope_theta": 5e5})).unwrap();
        assert_eq!(theta.rope, Rope { theta: 5e5, scaling: RopeScaling::None });
        let nested = serde_json::json!({
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 2e4},
        });
        for family in ["gemma3_text", "qwen2"] {
            let config = parsed(family, nested.clone()).unwrap();
            assert_eq!(config.rope, Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 8.0 } });
            assert_eq!(config.window_rope, Some(Rope { theta: 2e4, scaling: RopeScaling::Linear { factor: 2.0 } }));
        }
        let both = [
            ("rope_scaling", serde_json::json!({"type": "linear", "factor": 2.0})),
            ("rope_parameters", serde_json::json!({"rope_type": "linear", "factor": 4.0})),
        ];
        assert!(LmConfig::parse(&json(&both)).unwrap_err().contains("differ"));
    }

    #[test]
    fn windows_follow_the_model_family() {
        let windows = |kind: &str, changes: &[(&str, serde_json::Value)]| {
            let changes = [changes, &[("model_type", kind.into()), ("sliding_window", 512.into())]].concat();
            let config = LmConfig::parse(&json(&changes)).unwrap();
            assert_eq!(config.context, 2048);
            config.windows
        };
        let (all, none) = ([Some(512); 2], [None; 2]);
        assert_eq!(windows("mistral", &[]), all);
        assert_eq!(windows("phi3", &[]), all);
        assert_eq!(windows("qwen2", &[]), none, "off by default");
        assert_eq!(
            windows("qwen2", &[("use_sliding_window", true.into())]),
            none,
            "full attention on the first 28 layers"
        );
        let late = [("use_sliding_window", true.into()), ("max_window_layers", 1.into())];
        assert_eq!(windows("qwen2", &late), [None, Some(512)]);
        assert_eq!(windows("gemma2", &[]), [Some(512), None]);
        assert_eq!(windows("gemma3_text", &[]), all);
        let types = serde_json::json!(["full_attention", "sliding_attention"]);
        assert_eq!(windows("gemma3_text", &[("layer_types", types)]), [None, Some(512)]);
        assert_eq!(windows("llama", &[]), none);
    }
}
