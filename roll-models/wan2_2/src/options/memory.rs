//! Options of where weights and activations are kept.

use std::borrow::Cow;

use roll_core::WeightPlacement;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

use super::word_or;

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
    pub(crate) fn to_weight_placement(self) -> WeightPlacement {
        match self {
            Self::Auto | Self::Resident => WeightPlacement::Resident,
            Self::Streamed | Self::Host => WeightPlacement::Streamed,
            Self::Sharded => WeightPlacement::Sharded,
        }
    }
}

/// Location of the weights of the expert that is not in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IdleExpert {
    /// `keep` on the CPU; `host` or `drop` on GPUs if memory is short.
    #[default]
    Auto,
    /// The device.
    Keep,
    /// Host memory, in the dtype of the device.
    Host,
    /// The weight files.
    Drop,
}

impl IdleExpert {
    /// Resolves `Auto` for experts of `bytes` bytes in total. `memory` is that of the GPU, if the device is a GPU whose
    /// memory is known. `is_converted` says whether weights are computed while they are read, because the files have
    /// another dtype or LoRAs are merged. Computing is slower than a copy, so such experts stay in host memory instead
    /// of being read again.
    pub(crate) fn chosen(self, bytes: usize, is_gpu: bool, memory: Option<u64>, is_converted: bool) -> Self {
        let take_at_most_half = |memory: u64| 2 * bytes as u64 <= memory;
        match self {
            // The CPU computes in host memory.
            Self::Auto if !is_gpu => Self::Keep,
            Self::Auto if memory.is_some_and(take_at_most_half) => Self::Keep,
            Self::Auto if is_converted => Self::Host,
            Self::Auto => Self::Drop,
            given => given,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::super::tests::parsed;
    use super::*;

    #[test]
    fn keep_attention_is_auto_or_a_truth_value() {
        let parse = |value: serde_json::Value| parsed(json!({"keep_attention": value})).map(|o| o.keep_attention);
        for (value, expected) in [
            (json!("auto"), KeepAttention::Auto),
            (json!(true), KeepAttention::Of(true)),
            (json!(false), KeepAttention::Of(false)),
        ] {
            assert_eq!(parse(value.clone()).unwrap(), expected);
            assert_eq!(serde_json::to_value(expected).unwrap(), value);
        }
        assert!(parse(json!("yes")).unwrap_err().to_string().contains("keep_attention"));
    }

    #[test]
    fn location_of_the_idle_expert_follows_the_memory() {
        let chosen = |gpu, memory, converted| IdleExpert::Auto.chosen(57_000_000_000, gpu, memory, converted);
        assert_eq!(chosen(false, None, true), IdleExpert::Keep);
        assert_eq!(chosen(true, Some(141_000_000_000), true), IdleExpert::Keep);
        assert_eq!(chosen(true, Some(80_000_000_000), true), IdleExpert::Host);
        assert_eq!(
            (chosen(true, Some(80_000_000_000), false), chosen(true, None, false)),
            (IdleExpert::Drop, IdleExpert::Drop)
        );
        assert_eq!(IdleExpert::Host.chosen(1, false, None, false), IdleExpert::Host);
    }
}
