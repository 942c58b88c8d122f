//! Options that are lists, written as a YAML list or, as in ROLL, as one text with commas.
//!
//! Both forms are stored as the text, so that the record of a run does not depend on the form.

use std::fmt;

use schemars::{Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// Splits a text with commas into its entries: trimmed, without empty ones.
pub(crate) fn split(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|s| !s.is_empty()).map(Into::into).collect()
}

/// Reads a list and joins its entries with commas. Fails if an entry contains a comma.
pub(crate) fn required<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    deserializer.deserialize_any(List)
}

/// JSON schema of the values that [`required`] accepts.
pub(crate) fn required_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
}

/// JSON schema of the values that [`optional`] accepts.
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
