//! Types of option values, for components that describe their options by defaults alone.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// Type of an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the variants are their own documentation
pub enum OptionKind {
    Anything,
    Flag,
    WholeNumber,
    Number,
    Text,
    List,
    Map,
}

use OptionKind::{Anything, Flag, List, Map, Number, Text, WholeNumber};

impl OptionKind {
    /// The kind that a default implies. Only numbers and flags imply one: a word may be one of several variants, some
    /// of which hold more than a word, and a list may also be written as its one item.
    pub fn of(default: &Json) -> Self {
        match default {
            Json::Bool(_) => Flag,
            Json::Number(n) if n.is_f64() => Number,
            Json::Number(_) => WholeNumber,
            _ => Anything,
        }
    }

    /// Whether `value` is of this kind.
    pub fn admits(self, value: &Json) -> bool {
        match self {
            Anything => true,
            Flag => value.is_boolean(),
            WholeNumber => value.is_i64() || value.is_u64(),
            Number => value.is_number(),
            Text => value.is_string(),
            List => value.is_array(),
            Map => value.is_object(),
        }
    }

    /// Words for messages, such as "a number".
    pub fn words(self) -> &'static str {
        match self {
            Anything => "any value",
            Flag => "true or false",
            WholeNumber => "a whole number",
            Number => "a number",
            Text => "a text",
            List => "a list",
            Map => "a map",
        }
    }
}
