//! PEFT's `LoraConfig`: `adapter_config.json` next to a file, or `lora_adapter_metadata` in the header of a diffusers
//! file.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::error::LoraError;
use crate::trainable::is_target;

/// Name of the configuration file next to a PEFT adapter.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// Name of the weight file that PEFT reads from a directory.
pub(super) const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// Header key under which diffusers stores the configuration.
pub(super) const DIFFUSERS_KEY: &str = "lora_adapter_metadata";

/// The part of a `LoraConfig` that determines the scales of the layers.
#[derive(Clone, Debug)]
pub(super) struct Config {
    lora_alpha: f64,
    /// Whether the scale is `alpha / sqrt(rank)`.
    rank_stabilised: bool,
    /// Layers with their own alpha: the end of the layer's name, or the whole name after a `^`.
    alpha_pattern: Vec<(String, f64)>,
}

impl Config {
    /// Reads `object`, whose keys begin with `prefix`. Returns `None` if it has no alpha. Fails on options that make
    /// the adapter something other than a scaled product B A. Ranks are not read: that of a layer is in the
    /// shapes of its tensors.
    pub fn read(path: &Path, object: &Map<String, Value>, prefix: &str) -> Result<Option<Self>, LoraError> {
        let problem = |problem: String| LoraError::invalid(path, problem);
        let get = |key: &str| object.get(&format!("{prefix}{key}"));
        let is_true = |key: &str| get(key).and_then(Value::as_bool).unwrap_or(false);
        if let Some(kind) = get("peft_type").and_then(Value::as_str).filter(|k| *k != "LORA") {
            return Err(problem(format!("expected the `peft_type` LORA, found {kind}")));
        }
        for key in ["use_dora", "fan_in_fan_out"] {
            if is_true(key) {
                return Err(problem(format!("expected a plain LoRA, found `{key}: true`")));
            }
        }
        let Some(alpha) = get("lora_alpha") else { return Ok(None) };
        let number = |key: &str, value: &Value| match value.as_f64().filter(|a| a.is_finite()) {
            Some(number) => Ok(number),
            None => Err(problem(format!("`{key}`: expected a number, found {value}"))),
        };
        let mut alpha_pattern = Vec::new();
        match get("alpha_pattern") {
            Some(Value::Object(patterns)) => {
                for (name, value) in patterns {
                    if name.contains(['*', '+', '?', '(', ')', '[', ']', '|', '{', '}', '\\']) {
                        return Err(problem(format!(
                            "`alpha_pattern`: expected names of layers, found the pattern `{name}`"
                        )));
                    }
                    alpha_pattern.push((name.clone(), number("alpha_pattern", value)?));
                }
            }
            None | Some(Value::Null) => {}
            Some(other) => return Err(problem(format!("`alpha_pattern`: expected an object, found {other}"))),
        }
        let lora_alpha = number("lora_alpha", alpha)?;
        Ok(Some(Self { lora_alpha, rank_stabilised: is_true("use_rslora"), alpha_pattern }))
    }

    /// Returns the alpha of a layer of this rank, such that its scale is `alpha / rank`.
    pub fn alpha(&self, layer: &str, rank: usize) -> f64 {
        // PEFT's rule: the first pattern that is the whole name or its end after a dot.
        let own = self.alpha_pattern.iter().find(|(pattern, _)| match pattern.strip_prefix('^') {
            Some(whole) => whole == layer,
            None => is_target(layer, pattern),
        });
        let alpha = own.map_or(self.lora_alpha, |(_, alpha)| *alpha);
        if self.rank_stabilised { alpha * (rank as f64).sqrt() } else { alpha }
    }
}

/// Returns the fields of a `LoraConfig` for layers of these ranks and alphas, by layer name. Each key begins with
/// `prefix`.
pub(super) fn fields(layers: &BTreeMap<String, (usize, f64)>, bias: bool, prefix: &str) -> Map<String, Value> {
    let rank = most_common(layers.values().map(|(rank, _)| *rank as f64));
    let alpha = most_common(layers.values().map(|(_, alpha)| *alpha));
    let pattern = |value: &dyn Fn(&(usize, f64)) -> f64, common: f64| -> Value {
        let others =
            layers.iter().map(|(layer, rank_alpha)| (layer.clone(), value(rank_alpha))).filter(|(_, v)| *v != common);
        Value::Object(others.map(|(layer, v)| (layer, number(v))).collect())
    };
    let fields = [
        ("r", number(rank)),
        ("lora_alpha", number(alpha)),
        ("rank_pattern", pattern(&|(rank, _)| *rank as f64, rank)),
        ("alpha_pattern", pattern(&|(_, alpha)| *alpha, alpha)),
        ("target_modules", layers.keys().cloned().collect()),
        ("lora_bias", json!(bias)),
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

/// Writes whole numbers as integers: `r` must be an integer.
fn number(value: f64) -> Value {
    match value.fract() == 0.0 && value.abs() < 1e15 {
        true => json!(value as i64),
        false => json!(value),
    }
}

/// The most frequent value, the largest of equally frequent ones; 0 without values.
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
    }

    #[test]
    fn rejects_anything_but_a_plain_lora() {
        for (json, named) in [
            (r#"{"use_dora": true}"#, "use_dora"),
            (r#"{"peft_type": "IA3"}"#, "IA3"),
            (r#"{"lora_alpha": "x"}"#, "lora_alpha"),
            (r#"{"lora_alpha": 1, "alpha_pattern": {"q|k": 1}}"#, "q|k"),
            (r#"{"lora_alpha": 1, "alpha_pattern": 3}"#, "alpha_pattern"),
        ] {
            let message = config(json).unwrap_err().to_string();
            assert!(message.contains(named) && message.contains("adapter_config.json"), "{message}");
        }
    }

    #[test]
    fn written_configurations_read_back() {
        let layers = [("a.q", (4, 2.0)), ("a.k", (4, 2.0)), ("b.q", (8, 2.5))];
        let layers = layers.map(|(l, of)| (l.to_string(), of)).into();
        let fields = fields(&layers, false, "transformer.");
        assert_eq!(fields["transformer.rank_pattern"], json!({"b.q": 8}));
        let read = Config::read(Path::new("x"), &fields, "transformer.").unwrap().unwrap();
        for (layer, (rank, alpha)) in &layers {
            assert_eq!(read.alpha(layer, *rank), *alpha);
        }
    }
}
