//! Reads options that are lists: a YAML list or, as in ROLL, one text with commas.
//!
//! Both forms become the text with commas, so that the record of a run does not depend on the form.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::{Deserializer, Error};

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a list of texts, or one text with commas")]
enum CommaList {
    Text(String),
    Entries(Vec<String>),
}

impl CommaList {
    /// Returns the text with commas. Fails if an entry of a list contains a comma.
    fn joined<E: Error>(self) -> Result<String, E> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Entries(entries) => match entries.iter().find(|entry| entry.contains(',')) {
                Some(entry) => Err(E::custom(format!("`{entry}`: an entry of a list has no commas"))),
                None => Ok(entries.iter().map(|entry| entry.trim()).collect::<Vec<_>>().join(",")),
            },
        }
    }
}

/// Splits a text with commas into its entries, which are trimmed. Empty entries are left out.
pub fn split(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|s| !s.is_empty()).map(Into::into).collect()
}

/// Reads a list and joins its entries with commas. Fails if an entry contains a comma.
pub fn required<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    CommaList::deserialize(deserializer)?.joined()
}

/// Reads a list that may be `null`.
pub fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Option::<CommaList>::deserialize(deserializer)?.map(CommaList::joined).transpose()
}

/// JSON schema of the values that [`required`] accepts.
pub fn required_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
}

/// JSON schema of the values that [`optional`] accepts.
pub fn optional_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]})
}
