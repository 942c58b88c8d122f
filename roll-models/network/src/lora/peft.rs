//! Reads and writes PEFT's `LoraConfig`: `adapter_config.json` next to a PEFT file, or `lora_adapter_metadata` in the
//! header of a diffusers file. It has the scales of the layers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fancy_regex::Regex;
use serde_json::{Map, Value, json};

use super::error::LoraError;
use crate::trainable::is_target;

/// Name of the configuration file next to a PEFT adapter.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// Name of the weight file that PEFT reads from a directory.
pub(super) const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// Header key under which diffusers stores the configuration.
pub(super) const DIFFUSERS_KEY: &str = "lora_adapter_metadata";

/// PEFT's default of `lora_alpha`.
const DEFAULT_ALPHA: f64 = 8.0;

/// Fields that make an adapter something other than a scaled product `B A`, if they are set.
const OTHER_KINDS: &[(&str, &str)] = &[
    ("use_dora", "a DoRA, whose weights are normalised"),
    ("fan_in_fan_out", "an adapter of transposed weights"),
    ("use_qalora", "a QALoRA, whose inputs are averaged in groups"),
    ("use_bdlora", "a LoRA of block-diagonal matrices"),
    ("alora_invocation_tokens", "an activated LoRA, which works after certain tokens only"),
    ("arrow_config", "a router between several LoRAs"),
    ("kasa_config", "a KaSA, which changes the base"),
    ("monteclora_config", "a LoRA with sampled matrices"),
    ("layer_replication", "a LoRA of a model with repeated layers"),
    ("trainable_token_indices", "an adapter with trained embeddings of tokens"),
    ("target_parameters", "a LoRA of parameters that are no layers"),
    ("modules_to_save", "an adapter with whole trained layers"),
];

/// Values of `init_lora_weights` with which PEFT changes the weights of the base whenever it loads the adapter.
const CHANGES_OF_BASE: &[&str] = &["pissa", "olora", "loftq", "corda", "lora_ga"];

/// The part of a `LoraConfig` that determines what an adapter does: the scales of its layers, and which layers PEFT
/// loads.
#[derive(Clone, Debug)]
pub(super) struct Config {
    /// The file with the configuration.
    path: PathBuf,
    rank: Option<f64>,
    lora_alpha: f64,
    /// Whether the scale is `alpha / sqrt(rank)`.
    is_rank_stabilised: bool,
    rank_pattern: Vec<(Regex, f64)>,
    alpha_pattern: Vec<(Regex, f64)>,
    /// `lora_bias`: whether the matrices B have biases.
    has_bias: Option<bool>,
    /// `None` in the header of a diffusers file: diffusers takes the layers from the tensors.
    selection: Option<Selection>,
}

/// Which layers of a model have an adapter.
#[derive(Clone, Debug)]
struct Selection {
    /// `target_modules`; `None` selects all linear layers.
    targets: Option<Modules>,
    /// `exclude_modules`.
    excluded: Option<Modules>,
    /// `layers_to_transform`: numbers of blocks.
    blocks: Vec<i64>,
    /// Patterns of a layer's name whose group is the number of its block.
    block_patterns: Vec<Regex>,
}

/// A value of `target_modules` or `exclude_modules`.
#[derive(Clone, Debug)]
enum Modules {
    /// Names of layers, or the ends of their names after a dot.
    Names(Vec<String>),
    /// A pattern of the whole name.
    Pattern(Regex),
}

impl Modules {
    fn contains(&self, layer: &str) -> bool {
        match self {
            Self::Names(names) => names.iter().any(|name| is_target(layer, name)),
            Self::Pattern(pattern) => pattern.is_match(layer).unwrap_or(false),
        }
    }
}

/// The fields of a `LoraConfig` whose keys begin with `prefix`.
struct Fields<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
    prefix: &'a str,
}

impl<'a> Fields<'a> {
    /// The value of a field that is not null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(&format!("{}{key}", self.prefix)).filter(|value| !value.is_null())
    }

    fn problem(&self, problem: String) -> LoraError {
        LoraError::invalid(self.path, problem)
    }

    /// The error for the value `found` of the field `key`.
    fn unexpected(&self, key: &str, expected: &str, found: &Value) -> LoraError {
        self.problem(format!("`{key}`: expected {expected}, found {found}"))
    }

    /// A field that is true or false; `None` if it is missing.
    fn flag(&self, key: &str) -> Result<Option<bool>, LoraError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.unexpected(key, "true or false", value))
    }

    /// The finite number `value` of the field `key`.
    fn number(&self, key: &str, value: &Value) -> Result<f64, LoraError> {
        let number = value.as_f64().filter(|number| number.is_finite());
        number.ok_or_else(|| self.unexpected(key, "a number", value))
    }

    /// The rank `value` of the field `key`.
    fn rank(&self, key: &str, value: &Value) -> Result<f64, LoraError> {
        let rank = value.as_u64().filter(|rank| *rank > 0);
        rank.map(|rank| rank as f64).ok_or_else(|| self.unexpected(key, "a whole number above 0", value))
    }

    /// Compiles `expression`, which is made of the `pattern` in the field `key`.
    fn regex(&self, key: &str, pattern: &str, expression: &str) -> Result<Regex, LoraError> {
        Regex::new(expression)
            .map_err(|e| self.problem(format!("`{key}`: expected a regular expression, found `{pattern}`: {e}")))
    }

    /// A map from patterns of names to numbers, in the order of the file.
    fn patterns(
        &self,
        key: &str,
        number: impl Fn(&Self, &str, &Value) -> Result<f64, LoraError>,
    ) -> Result<Vec<(Regex, f64)>, LoraError> {
        let map = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Object(map)) => map,
            Some(other) => return Err(self.unexpected(key, "an object", other)),
        };
        let entry = |(pattern, value): (&String, &Value)| {
            Ok((self.regex(key, pattern, &format!(r"^(.*\.)?({pattern})$"))?, number(self, key, value)?))
        };
        map.iter().map(entry).collect()
    }

    /// A list of texts, or one text. Empty if the field is missing.
    fn texts(&self, key: &str) -> Result<Vec<String>, LoraError> {
        let expected = "a text or a list of texts";
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::String(one)) => Ok(vec![one.clone()]),
            Some(Value::Array(all)) => {
                let text =
                    |value: &Value| value.as_str().map(Into::into).ok_or_else(|| self.unexpected(key, expected, value));
                all.iter().map(text).collect()
            }
            Some(other) => Err(self.unexpected(key, expected, other)),
        }
    }

    /// A list of names, or one pattern of whole names. `None` if the field is missing or empty.
    fn modules(&self, key: &str) -> Result<Option<Modules>, LoraError> {
        match self.get(key) {
            Some(Value::String(pattern)) if !pattern.is_empty() => {
                Ok(Some(Modules::Pattern(self.regex(key, pattern, &format!(r"\A(?:{pattern})\z"))?)))
            }
            _ => {
                let names = self.texts(key)?;
                let has_name = names.iter().any(|name| !name.is_empty());
                Ok(has_name.then_some(Modules::Names(names)))
            }
        }
    }

    /// Reads the fields that select layers.
    fn selection(&self) -> Result<Selection, LoraError> {
        let is_all = |value: &Value| value.as_str().is_some_and(|text| text.eq_ignore_ascii_case("all-linear"));
        let targets = match self.get("target_modules") {
            Some(value) if is_all(value) => None,
            _ => self.modules("target_modules")?,
        };
        let key = "layers_to_transform";
        let expected = "a whole number or a list of them";
        let number = |value: &Value| value.as_i64().ok_or_else(|| self.unexpected(key, expected, value));
        let blocks = match self.get(key) {
            None => Vec::new(),
            Some(Value::Array(all)) => all.iter().map(number).collect::<Result<_, _>>()?,
            Some(one) => vec![number(one)?],
        };
        let patterns: Vec<String> = self.texts("layers_pattern")?.into_iter().filter(|p| !p.is_empty()).collect();
        // Without `layers_pattern`, PEFT takes the first number behind two names for the number of the block.
        let block_patterns = if patterns.is_empty() {
            vec![self.regex("layers_pattern", "", r"^.*?\.[^.]*\.(\d+)\.")?]
        } else {
            let compile = |p: &String| self.regex("layers_pattern", p, &format!(r"^.*?\.(?:{p})\.(\d+)\."));
            patterns.iter().map(compile).collect::<Result<_, _>>()?
        };
        Ok(Selection { targets, excluded: self.modules("exclude_modules")?, blocks, block_patterns })
    }

    /// Fails on a field that makes the adapter something other than a scaled product `B A`, or that belongs to a changed
    /// base.
    fn check_plain(&self) -> Result<(), LoraError> {
        self.refuse_other_kinds()?;
        self.refuse_changed_base()
    }

    /// The error for a field that a plain LoRA does not have; `what` describes the adapter.
    fn not_plain<T>(&self, key: &str, value: &Value, what: &str) -> Result<T, LoraError> {
        Err(self.problem(format!("expected a plain LoRA, found `{key}: {value}`: {what}")))
    }

    /// Fails on a field that makes the adapter something other than a scaled product `B A`.
    fn refuse_other_kinds(&self) -> Result<(), LoraError> {
        if let Some(kind) = self.get("peft_type").and_then(Value::as_str).filter(|kind| *kind != "LORA") {
            return Err(self.problem(format!("expected the `peft_type` LORA, found {kind}")));
        }
        let is_set = |value: &Value| match value {
            Value::Null => false,
            Value::Bool(flag) => *flag,
            Value::Number(number) => number.as_f64() != Some(0.0),
            Value::String(text) => !text.is_empty(),
            Value::Array(all) => !all.is_empty(),
            Value::Object(all) => !all.is_empty(),
        };
        for (key, what) in OTHER_KINDS {
            if let Some(value) = self.get(key).filter(|value| is_set(value)) {
                return self.not_plain(key, value, what);
            }
        }
        let is_known = |key: &str| key == "use_rslora" || OTHER_KINDS.iter().any(|(other, _)| *other == key);
        for (key, value) in self.object {
            let Some(key) = key.strip_prefix(self.prefix) else { continue };
            if key.starts_with("use_") && is_set(value) && !is_known(key) {
                return self.not_plain(key, value, "a kind of LoRA that is not known here");
            }
        }
        Ok(())
    }

    /// Fails if the weights of the base were changed, too, because the adapter alone is then not all that was trained.
    fn refuse_changed_base(&self) -> Result<(), LoraError> {
        if let Some(bias) = self.get("bias").filter(|bias| bias.as_str() != Some("none")) {
            let what = "biases of the base were trained, too; if it has none, set it to none";
            return self.not_plain("bias", bias, what);
        }
        let changes_base = |value: &Value| {
            let name = value.as_str().unwrap_or_default().to_lowercase();
            CHANGES_OF_BASE.iter().any(|change| name.starts_with(change))
        };
        match self.get("init_lora_weights") {
            Some(value) if changes_base(value) => self.not_plain(
                "init_lora_weights",
                value,
                "the weights of its base were changed, too; save it as a LoRA of the unchanged base \
                 (PEFT's path_initial_model_for_weight_conversion)",
            ),
            _ => Ok(()),
        }
    }
}

impl Config {
    /// Reads `object`, whose keys begin with `prefix`. Returns `None` if it has no such key. Fails on options that make
    /// the adapter something other than a scaled product `B A`.
    pub fn read(path: &Path, object: &Map<String, Value>, prefix: &str) -> Result<Option<Self>, LoraError> {
        if !object.keys().any(|key| key.starts_with(prefix)) {
            return Ok(None);
        }
        let fields = Fields { path, object, prefix };
        fields.check_plain()?;
        let alpha = fields.get("lora_alpha").map(|alpha| fields.number("lora_alpha", alpha)).transpose()?;
        Ok(Some(Self {
            path: path.into(),
            rank: fields.get("r").map(|rank| fields.rank("r", rank)).transpose()?,
            lora_alpha: alpha.unwrap_or(DEFAULT_ALPHA),
            is_rank_stabilised: fields.flag("use_rslora")?.unwrap_or(false),
            rank_pattern: fields.patterns("rank_pattern", Fields::rank)?,
            alpha_pattern: fields.patterns("alpha_pattern", Fields::number)?,
            has_bias: fields.flag("lora_bias")?,
            selection: if prefix.is_empty() { Some(fields.selection()?) } else { None },
        }))
    }

    /// Returns the alpha of a layer of this rank, such that its scale is `alpha / rank`. A rank-stabilised scale is
    /// `alpha / sqrt(rank)`, so its alpha is multiplied by `sqrt(rank)`.
    pub fn alpha(&self, layer: &str, rank: usize) -> f64 {
        let alpha = first_match(&self.alpha_pattern, layer).unwrap_or(self.lora_alpha);
        if self.is_rank_stabilised { alpha * (rank as f64).sqrt() } else { alpha }
    }

    /// Fails if PEFT would not load this layer of the file, because the configuration does not select it, or has
    /// another rank or no bias for it.
    pub fn check(&self, layer: &str, rank: usize, has_bias: bool) -> Result<(), LoraError> {
        let contradicts = |found: String| {
            let problem =
                format!("layer `{layer}`: {found}, so PEFT would not load it; they belong to different adapters");
            Err(LoraError::invalid(&self.path, problem))
        };
        let by_pattern = first_match(&self.rank_pattern, layer).map(|rank| ("rank_pattern", rank));
        if let Some((key, configured)) = by_pattern.or(self.rank.map(|rank| ("r", rank)))
            && configured != rank as f64
        {
            return contradicts(format!("its matrices have rank {rank}, `{key}` says {configured}"));
        }
        if has_bias && self.has_bias == Some(false) {
            return contradicts("it has a bias of B, `lora_bias` is false".into());
        }
        match self.selection.as_ref().and_then(|selection| selection.excluding_key(layer)) {
            Some(key) => contradicts(format!("`{key}` leaves it out")),
            None => Ok(()),
        }
    }
}

/// The value of the first pattern that matches the layer's whole name or its end after a dot, as in PEFT.
fn first_match(patterns: &[(Regex, f64)], layer: &str) -> Option<f64> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(layer).unwrap_or(false)).map(|(_, value)| *value)
}

impl Selection {
    /// The configuration's key that leaves out `layer`; `None` if the layer is selected.
    fn excluding_key(&self, layer: &str) -> Option<&'static str> {
        if self.excluded.as_ref().is_some_and(|excluded| excluded.contains(layer)) {
            return Some("exclude_modules");
        }
        let targets = self.targets.as_ref()?;
        if !targets.contains(layer) {
            return Some("target_modules");
        }
        match targets {
            // `layers_to_transform` limits the blocks of layers that a list selects by the end of their names.
            Modules::Names(names) if !self.blocks.is_empty() && !names.iter().any(|name| name == layer) => {
                let block =
                    self.block_patterns.iter().find_map(|pattern| pattern.captures(layer).ok().flatten()?.get(1));
                let block = block.and_then(|number| number.as_str().parse().ok());
                block.is_none_or(|block| !self.blocks.contains(&block)).then_some("layers_to_transform")
            }
            _ => None,
        }
    }
}

/// The rank and alpha of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankAndAlpha {
    pub rank: usize,
    pub alpha: f64,
}

/// Returns the fields of a `LoraConfig` for layers of these ranks and alphas, by layer name. Each key begins with
/// `prefix`. `has_bias` is whether matrices B have biases.
pub(super) fn fields(layers: &BTreeMap<String, RankAndAlpha>, has_bias: bool, prefix: &str) -> Map<String, Value> {
    let rank_of = |layer: &RankAndAlpha| layer.rank as f64;
    let alpha_of = |layer: &RankAndAlpha| layer.alpha;
    let common_rank = most_common(layers.values().map(rank_of));
    let common_alpha = most_common(layers.values().map(alpha_of));
    // The values of the layers that do not have the common value.
    let exceptions = |value_of: &dyn Fn(&RankAndAlpha) -> f64, common: f64| -> Value {
        let values = layers.iter().map(|(name, layer)| (name.clone(), value_of(layer)));
        Value::Object(values.filter(|(_, v)| *v != common).map(|(name, v)| (name, number(v))).collect())
    };
    let fields = [
        ("r", number(common_rank)),
        ("lora_alpha", number(common_alpha)),
        ("rank_pattern", exceptions(&rank_of, common_rank)),
        ("alpha_pattern", exceptions(&alpha_of, common_alpha)),
        ("target_modules", layers.keys().cloned().collect()),
        ("lora_bias", json!(has_bias)),
        ("use_dora", json!(false)),
    ];
    fields.into_iter().map(|(key, value)| (format!("{prefix}{key}"), value)).collect()
}

/// Completes an `adapter_config.json`: adds the remaining fields to the result of [`fields`].
pub(super) fn adapter_config(fields: Map<String, Value>) -> Value {
    let mut config = json!({
        "peft_type": "LORA", "task_type": null, "base_model_name_or_path": null, "inference_mode": true,
        "bias": "none", "lora_dropout": 0.0, "fan_in_fan_out": false, "use_rslora": false, "modules_to_save": null,
    });
    if let Value::Object(map) = &mut config {
        map.extend(fields);
    }
    config
}

/// A JSON number: an integer if the value is a whole number, because `r` must be an integer.
fn number(value: f64) -> Value {
    // Whole numbers below 1e15 are exact in f64.
    let is_integer = value.fract() == 0.0 && value.abs() < 1e15;
    if is_integer { json!(value as i64) } else { json!(value) }
}

/// The most frequent value; the largest of several equally frequent values; 0 without values.
fn most_common(values: impl Iterator<Item = f64>) -> f64 {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    values.for_each(|v| *counts.entry(v.to_bits()).or_default() += 1);
    // `max_by_key` returns the last maximum, and the bits of positive numbers are in their order.
    counts.into_iter().max_by_key(|(_, count)| *count).map_or(0.0, |(bits, _)| f64::from_bits(bits))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn config(json: &str) -> Result<Option<Config>, LoraError> {
        Config::read(
            Path::new("adapter_config.json"),
            serde_json::from_str::<Value>(json).unwrap().as_object().unwrap(),
            "",
        )
    }

    #[test]
    fn alphas_follow_patterns_and_rank_stabilisation() {
        let c = config(r#"{"lora_alpha": 8, "alpha_pattern": {"q": 2, "^blocks.0.k": 3, "attn.v": 4.5}}"#)
            .unwrap()
            .unwrap();
        let alphas = ["blocks.0.q", "blocks.0.k", "x.blocks.0.k", "a.attn.v", "a.xattn.v"].map(|l| c.alpha(l, 4));
        assert_eq!(alphas, [2.0, 3.0, 8.0, 4.5, 8.0]);
        let c = config(r#"{"lora_alpha": 8, "use_rslora": true}"#).unwrap().unwrap();
        assert_eq!(c.alpha("x", 16), 32.0, "8 / sqrt(16) = 32 / 16");
        assert!(config("{}").unwrap().is_none());
        assert_eq!(config(r#"{"r": 4}"#).unwrap().unwrap().alpha("x", 4), 8.0, "PEFT's default");
    }

    /// Expected values: `re.match(rf"(.*\.)?({key})$", name)` of Python over the keys in their order, as in PEFT's
    /// `get_pattern_key`.
    #[test]
    fn patterns_are_regular_expressions_of_the_end_of_a_name_in_their_own_order() {
        for (patterns, layer, expected) in [
            (r#"{"q|k": 1}"#, "blocks.0.self_attn.k", 1.0),
            (r#"{"q|k": 1}"#, "blocks.0.self_attn.qk", 8.0),
            (r#"{"z": 1, "k": 2, "self_attn.k": 3, "a": 4}"#, "blocks.0.self_attn.k", 2.0),
            (r#"{"self_attn.k": 3, "k": 2}"#, "blocks.0.self_attn.k", 3.0),
            (r#"{"blocks\\.[01]\\..*": 1}"#, "blocks.1.ffn.0", 1.0),
            (r#"{"blocks\\.[01]\\..*": 1}"#, "blocks.12.ffn.0", 8.0),
            (r#"{".*self_attn.*": 1}"#, "blocks.12.self_attn.q", 1.0),
            (r#"{"self_attn": 1}"#, "blocks.12.self_attn.q", 8.0),
            (r#"{"self.attn.q": 1}"#, "blocks.12.self_attn.q", 1.0),
            (r#"{"^blocks.0.self_attn.q": 1}"#, "blocks.0.self_attn.q", 1.0),
            (r#"{"^self_attn.q": 1}"#, "blocks.0.self_attn.q", 8.0),
            (r#"{"^blocks": 1}"#, "blocks.0.self_attn.q", 8.0),
            (r#"{"(?!.*cross).*\\.q": 1}"#, "blocks.0.self_attn.q", 1.0),
        ] {
            let text = format!(r#"{{"lora_alpha": 8, "alpha_pattern": {patterns}}}"#);
            assert_eq!(config(&text).unwrap().unwrap().alpha(layer, 4), expected, "{patterns}: {layer}");
        }
    }

    /// Expected values: `check_target_module_exists` of PEFT 0.19.
    #[test]
    fn layers_are_those_that_peft_would_load() {
        let q = "model.layers.3.self_attn.q_proj";
        for (fields, layer, against) in [
            (r#""target_modules": ["q_proj"]"#, q, None),
            (r#""target_modules": ["self_attn.q_proj"]"#, q, None),
            (r#""target_modules": ["_proj", "k_proj"]"#, q, Some("target_modules")),
            (r#""target_modules": ".*q_proj""#, q, None),
            (r#""target_modules": "q_proj""#, q, Some("target_modules")),
            (r#""target_modules": "model\\.layers(?=\\.)\\.[0-3]\\..*""#, q, None),
            (r#""target_modules": "all-linear""#, q, None),
            (r#""target_modules": "All-Linear", "exclude_modules": ["q_proj"]"#, q, Some("exclude_modules")),
            (r#""target_modules": null"#, q, None),
            (r#""target_modules": ["q_proj"], "exclude_modules": ["k_proj"]"#, q, None),
            (r#""target_modules": ["q_proj"], "exclude_modules": ".*\\.3\\..*""#, q, Some("exclude_modules")),
            (r#""target_modules": ["q_proj"], "layers_to_transform": [3, 4]"#, q, None),
            (r#""target_modules": ["q_proj"], "layers_to_transform": 3"#, q, None),
            (r#""target_modules": ["q_proj"], "layers_to_transform": []"#, q, None),
            (r#""target_modules": ["q_proj"], "layers_to_transform": 2"#, q, Some("layers_to_transform")),
            (r#""target_modules": ["q_proj"], "layers_to_transform": 3, "layers_pattern": "layers""#, q, None),
            (
                r#""target_modules": ["q_proj"], "layers_to_transform": 3, "layers_pattern": ["h"]"#,
                q,
                Some("layers_to_transform"),
            ),
            (r#""target_modules": ["model.layers.3.self_attn.q_proj"], "layers_to_transform": 2"#, q, None),
            (r#""target_modules": ["gate"], "layers_to_transform": 1"#, "model.layers.1.experts.0.gate", None),
            (r#""target_modules": ["q"], "rank_pattern": {"k": 8}"#, "blocks.0.q", None),
            (r#""rank_pattern": {"q": 8}"#, "blocks.0.q", Some("`rank_pattern` says 8")),
            (r#""r": 2"#, "blocks.0.q", Some("`r` says 2")),
            (r#""r": 2, "rank_pattern": {"q|k": 4}"#, "blocks.0.q", None),
        ] {
            let checked = config(&format!(r#"{{"lora_alpha": 8, {fields}}}"#)).unwrap().unwrap().check(layer, 4, false);
            match (checked, against) {
                (Ok(()), None) => {}
                (Err(e), Some(key)) => assert!(e.to_string().contains(key) && e.to_string().contains(layer), "{e}"),
                (checked, _) => panic!("{fields}: {checked:?}"),
            }
        }
        let with_bias =
            |flag: bool| config(&format!(r#"{{"lora_bias": {flag}}}"#)).unwrap().unwrap().check("x", 4, true);
        assert!(with_bias(true).is_ok() && with_bias(false).unwrap_err().to_string().contains("lora_bias"));
    }

    #[test]
    fn rejects_anything_but_a_plain_lora() {
        for (json, named) in [
            (r#"{"use_dora": true}"#, "use_dora"),
            (r#"{"fan_in_fan_out": true}"#, "fan_in_fan_out"),
            (r#"{"use_qalora": true}"#, "use_qalora"),
            (r#"{"use_new_kind": true}"#, "use_new_kind"),
            (r#"{"modules_to_save": ["lm_head"]}"#, "lm_head"),
            (r#"{"bias": "lora_only"}"#, "bias"),
            (r#"{"bias": "all"}"#, "bias"),
            (r#"{"layer_replication": [[0, 2]]}"#, "layer_replication"),
            (r#"{"target_parameters": ["experts.gate_up_proj"]}"#, "target_parameters"),
            (r#"{"trainable_token_indices": [3]}"#, "trainable_token_indices"),
            (r#"{"init_lora_weights": "pissa_niter_4"}"#, "init_lora_weights"),
            (r#"{"peft_type": "IA3"}"#, "IA3"),
            (r#"{"lora_alpha": "x"}"#, "lora_alpha"),
            (r#"{"r": 0}"#, "`r`"),
            (r#"{"use_rslora": "yes"}"#, "use_rslora"),
            (r#"{"lora_alpha": 1, "alpha_pattern": {"q(": 1}}"#, "q("),
            (r#"{"lora_alpha": 1, "alpha_pattern": 3}"#, "alpha_pattern"),
            (r#"{"rank_pattern": {"q": 1.5}}"#, "rank_pattern"),
            (r#"{"target_modules": "q_proj("}"#, "target_modules"),
            (r#"{"target_modules": [3]}"#, "target_modules"),
            (r#"{"layers_to_transform": ["x"]}"#, "layers_to_transform"),
        ] {
            let message = config(json).unwrap_err().to_string();
            assert!(message.contains(named) && message.contains("adapter_config.json"), "{json}: {message}");
        }
        let plain = r#"{"use_dora": false, "use_qalora": false, "modules_to_save": null, "bias": "none", "r": 8,
            "init_lora_weights": "gaussian", "target_parameters": null, "layer_replication": null, "loftq_config": {},
            "qalora_group_size": 16, "arrow_config": null, "runtime_config": {"ephemeral_gpu_offload": false}}"#;
        assert!(config(plain).unwrap().is_some());
    }

    #[test]
    fn written_configurations_read_back() {
        let layers = [("a.q", (4, 2.0)), ("a.k", (4, 2.0)), ("b.q", (8, 2.5))];
        let layers = layers.map(|(layer, (rank, alpha))| (layer.to_string(), RankAndAlpha { rank, alpha })).into();
        let fields = fields(&layers, false, "transformer.");
        assert_eq!(fields["transformer.rank_pattern"], json!({"b.q": 8}));
        let read = Config::read(Path::new("x"), &fields, "transformer.").unwrap().unwrap();
        for (layer, RankAndAlpha { rank, alpha }) in &layers {
            assert_eq!(read.alpha(layer, *rank), *alpha);
        }
    }
}
