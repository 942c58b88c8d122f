//! Options of the VAE: its tiles and its checkpoints.

use std::borrow::Cow;

use roll_network::options::word_or;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

/// Size of the tiles of the VAE in latent pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TileSize {
    /// Chosen by the device's memory.
    #[default]
    Auto,
    /// Whole frames: one tile.
    #[serde(rename = "none")]
    Whole,
    /// Height and width.
    #[serde(untagged)]
    Of([usize; 2]),
}

impl JsonSchema for TileSize {
    fn schema_name() -> Cow<'static, str> {
        "TileSize".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"const": "auto"}, {"const": "none"}, <[usize; 2]>::json_schema(generator)]})
    }
}

impl<'de> Deserialize<'de> for TileSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let words = [("auto", Self::Auto), ("none", Self::Whole)];
        word_or(deserializer, &words, Self::Of, "`auto`, `none` or [height, width]")
    }
}

/// Number of checkpoints in the VAE's decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Checkpoints {
    /// Chosen by the available memory.
    #[default]
    Auto,
    /// This number, besides the first.
    #[serde(untagged)]
    Of(usize),
}

impl JsonSchema for Checkpoints {
    fn schema_name() -> Cow<'static, str> {
        "Checkpoints".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"const": "auto"}, usize::json_schema(generator)]})
    }
}

impl<'de> Deserialize<'de> for Checkpoints {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        word_or(deserializer, &[("auto", Self::Auto)], Self::Of, "`auto` or a whole number of at least 0")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::super::tests::parsed;
    use super::*;

    #[test]
    fn tile_size_is_a_word_a_size_or_null() {
        let tiles = |value: serde_json::Value| parsed(json!({"vae_tile_size": value})).map(|o| o.vae_tile_size);
        assert_eq!(tiles(json!("auto")).unwrap(), TileSize::Auto);
        assert_eq!((tiles(json!("none")).unwrap(), tiles(json!(null)).unwrap()), (TileSize::Whole, TileSize::Whole));
        assert_eq!(tiles(json!([34, 34])).unwrap(), TileSize::Of([34, 34]));
        for value in [json!("some"), json!([34]), json!(34)] {
            let message = tiles(value).unwrap_err().to_string();
            assert!(message.contains("[height, width]"), "{message}");
        }
        for size in [TileSize::Auto, TileSize::Whole, TileSize::Of([8, 9])] {
            let text = serde_json::to_value(size).unwrap();
            assert_eq!(serde_json::from_value::<TileSize>(text).unwrap(), size);
        }
    }

    #[test]
    fn checkpoints_are_auto_or_a_number() {
        let checkpoints =
            |value: serde_json::Value| parsed(json!({"vae_checkpoints": value})).map(|o| o.vae_checkpoints);
        assert_eq!(checkpoints(json!("auto")).unwrap(), Checkpoints::Auto);
        assert_eq!(checkpoints(json!(0)).unwrap(), Checkpoints::Of(0));
        for value in [json!("all"), json!(-1), json!([4])] {
            let message = checkpoints(value).unwrap_err().to_string();
            assert!(message.contains("vae_checkpoints"), "{message}");
        }
        for count in [Checkpoints::Auto, Checkpoints::Of(7)] {
            let text = serde_json::to_value(count).unwrap();
            assert_eq!(serde_json::from_value::<Checkpoints>(text).unwrap(), count);
        }
    }
}
