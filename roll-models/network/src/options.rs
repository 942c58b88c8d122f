//! Options that several models have: where frozen weights lie, what passes keep, the dtype of a VAE.

use std::borrow::Cow;

use burn_tensor::DType;
use roll_core::{Result, WeightPlacement};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};
use serde_json::Value as Json;

use crate::precision::DeviceTraits;

/// Location of frozen weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// As the strategy requires, or resident.
    #[default]
    Auto,
    /// Always on the device.
    Resident,
    /// Memory-mapped files, which are read block by block with a prefetch of one block.
    Streamed,
    /// Host memory; blocks are copied to the device one by one, with a prefetch of one block.
    Host,
    /// Sharded between the ranks; gathered block by block.
    Sharded,
}

impl Placement {
    /// Returns this location, or the strategy's if this one is `Auto`.
    pub fn or(self, wanted: Option<WeightPlacement>) -> Self {
        match (self, wanted) {
            (Self::Auto, Some(WeightPlacement::Resident)) => Self::Resident,
            (Self::Auto, Some(WeightPlacement::Streamed)) => Self::Streamed,
            (Self::Auto, Some(WeightPlacement::Sharded)) => Self::Sharded,
            (given, _) => given,
        }
    }

    /// The location as [`roll_core::Distribution`] names it.
    pub fn to_weight_placement(self) -> WeightPlacement {
        match self {
            Self::Auto | Self::Resident => WeightPlacement::Resident,
            Self::Streamed | Self::Host => WeightPlacement::Streamed,
            Self::Sharded => WeightPlacement::Sharded,
        }
    }
}

/// Whether results of self-attention are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepAttention {
    /// If they fit on the device.
    #[default]
    Auto,
    /// As given.
    #[serde(untagged)]
    Of(bool),
}

impl KeepAttention {
    /// Whether results are kept whatever the memory of the device is. `Auto` keeps them only where they are known to
    /// fit.
    pub fn is_always(self) -> bool {
        self == Self::Of(true)
    }
}

impl JsonSchema for KeepAttention {
    fn schema_name() -> Cow<'static, str> {
        "KeepAttention".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"const": "auto"}, bool::json_schema(generator)]})
    }
}

impl<'de> Deserialize<'de> for KeepAttention {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        word_or(deserializer, &[("auto", Self::Auto)], Self::Of, "`auto`, `true` or `false`")
    }
}

/// Dtype of the VAE's decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VaeDType {
    /// bf16 on `libtorch-cuda`, f32 elsewhere.
    #[default]
    Auto,
    /// f32.
    F32,
    /// bf16, accumulated in f32.
    Bf16,
}

impl VaeDType {
    /// The dtype of a decoder on `device`. Fails if bf16 is requested and the device has none.
    pub fn of(self, device: DeviceTraits) -> Result<DType> {
        match self {
            Self::Bf16 => device.bf16("model.vae_dtype"),
            Self::Auto if device.convolves_bf16 => Ok(DType::BF16),
            Self::Auto | Self::F32 => Ok(DType::F32),
        }
    }
}

/// Reads one of `words`, or else a value for `of`. YAML's `null` is the word `none`.
pub fn word_or<'de, D: Deserializer<'de>, C: Copy, T: de::DeserializeOwned>(
    deserializer: D,
    words: &[(&str, C)],
    of: fn(T) -> C,
    expected: &str,
) -> std::result::Result<C, D::Error> {
    let value = Json::deserialize(deserializer)?;
    let word = if value.is_null() { Some("none") } else { value.as_str() };
    if let Some((_, choice)) = words.iter().find(|(name, _)| word == Some(*name)) {
        return Ok(*choice);
    }
    let unexpected = |_| de::Error::custom(format!("expected {expected}, found {value}"));
    serde_json::from_value(value.clone()).map(of).map_err(unexpected)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keep_attention_is_auto_or_a_truth_value() {
        let parse = serde_json::from_value::<KeepAttention>;
        for (value, expected) in [
            (json!("auto"), KeepAttention::Auto),
            (json!(true), KeepAttention::Of(true)),
            (json!(false), KeepAttention::Of(false)),
        ] {
            assert_eq!(parse(value.clone()).unwrap(), expected);
            assert_eq!(serde_json::to_value(expected).unwrap(), value);
        }
        assert!(parse(json!("yes")).unwrap_err().to_string().contains("`auto`, `true` or `false`"));
    }
}
