//! Options that are lists: one of YAML, or a text with commas, as ROLL writes them.
//!
//! Both are kept as the text, so that the record of a run does not depend on how it was written.

use std::fmt;

use schemars::{Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// The entries of a list.
pub(crate) fn split(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|s| !s.is_empty()).map(Into::into).collect()
}

/// Reads a list.
pub(crate) fn required<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    deserializer.deserialize_any(List)
}

/// Input of [`required`].
pub(crate) fn required_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
}

/// Input of [`optional`].
pub(crate) fn optional_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]})
}

/// Reads a list that may be `null`.
pub(crate) fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    deserializer.deserialize_option(Maybe)
}

struct List;

impl<'de> Visitor<'de> for List {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of texts, or one text with commas")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<String, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = list.next_element::<String>()? {
            if entry.contains(',') {
                return Err(A::Error::custom(format!("`{entry}`: an entry of a list has no commas")));
            }
            entries.push(entry.trim().to_string());
        }
        Ok(entries.join(","))
    }
}

struct Maybe;

impl<'de> Visitor<'de> for Maybe {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        List.expecting(f)
    }

    fn visit_none<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        required(deserializer).map(Some)
    }
}
