//! The options of a component.

use serde_json::Value as Json;

#[cfg(feature = "host")]
use crate::{Error, Result};
use crate::{Key, Options};

/// Type of an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// In the order of their numbers at the boundary.
const KINDS: [OptionKind; 7] = [Anything, Flag, WholeNumber, Number, Text, List, Map];

impl OptionKind {
    #[cfg(feature = "host")]
    pub(super) fn from_number(number: u32) -> Option<Self> {
        KINDS.get(number as usize).copied()
    }

    pub(super) fn number(self) -> u32 {
        KINDS.iter().position(|k| *k == self).unwrap_or_default() as u32
    }

    /// The kind of values that a default stands for: only numbers and flags say enough. A word may be one of several
    /// variants, some of which hold more than a word, and a list may also be given as its one item.
    pub(crate) fn of(default: &Json) -> Self {
        match default {
            Json::Bool(_) => Flag,
            Json::Number(n) if n.is_f64() => Number,
            Json::Number(_) => WholeNumber,
            _ => Anything,
        }
    }

    #[cfg(feature = "host")]
    fn admits(self, value: &Json) -> bool {
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

    /// For messages: "a number".
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

/// One option.
#[derive(Clone, Debug, PartialEq)]
pub struct OptionSpec {
    /// Its key.
    pub name: String,
    /// Type of its value.
    pub kind: OptionKind,
    /// Its default.
    pub default: Json,
    /// Its effect; may be empty.
    pub about: String,
}

impl OptionSpec {
    /// One per default, with its meaning where `keys` know it.
    pub(super) fn from_defaults(defaults: Options, keys: &[Key]) -> Vec<Self> {
        let about = |name: &str| keys.iter().find(|key| key.name == name).map(|key| key.about.clone());
        let spec = |(name, default): (String, Json)| Self {
            about: about(&name).unwrap_or_default(),
            name,
            kind: OptionKind::of(&default),
            default,
        };
        defaults.into_iter().map(spec).collect()
    }

    #[cfg(feature = "host")]
    /// As the configuration's own keys are told.
    pub(super) fn key(&self) -> Key {
        Key {
            name: self.name.clone(),
            about: self.about.clone(),
            values: self.kind.words().into(),
            choices: Vec::new(),
            default: Some(self.default.clone()),
            schema: Json::Null,
        }
    }

    #[cfg(feature = "host")]
    /// The defaults by name.
    pub(super) fn defaults(specs: &[Self]) -> Options {
        specs.iter().map(|s| (s.name.clone(), s.default.clone())).collect()
    }
}

#[cfg(feature = "host")]
/// `options` with the defaults of those that are missing. Fails on unknown ones and on values of the wrong kind;
/// `prefix` is their place in the configuration.
pub(super) fn complete(prefix: &str, specs: &[OptionSpec], options: &Options) -> Result<Options> {
    for (name, value) in options {
        let Some(spec) = specs.iter().find(|s| s.name == *name) else {
            let near = crate::error::nearest(name, specs.iter().map(|s| s.name.as_str()));
            let hint = near.map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
            return Err(Error::config(format!("{prefix}.{name}"), format!("unknown key{hint}")));
        };
        if !spec.kind.admits(value) {
            let problem = format!("expected {}, found {value}", spec.kind.words());
            return Err(Error::config(format!("{prefix}.{name}"), problem));
        }
    }
    let mut whole = OptionSpec::defaults(specs);
    whole.extend(options.clone());
    Ok(whole)
}
