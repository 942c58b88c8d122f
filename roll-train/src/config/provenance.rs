//! The origins of the values of a configuration: file and line, environment variable, or argument.

use std::collections::BTreeMap;

use config::{Value, ValueKind};
use serde_json::Value as Json;

use super::yaml::child;
use roll_core::Error;

/// The origin of each value, by dotted key; values without an entry are defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Provenance(BTreeMap<String, String>);

impl Provenance {
    /// Records the origin of a key.
    pub(super) fn note(&mut self, key: &str, origin: String) {
        if !key.is_empty() {
            self.0.insert(key.into(), origin);
        }
    }

    /// The origin of `key`: `default`, `train.yaml:12`, `environment variable ROLL_SEED`, `--set`.
    pub fn of(&self, key: &str) -> &str {
        self.explicit(key).unwrap_or("default")
    }

    /// Whether any layer above the defaults set `key` or something below it.
    pub fn is_set(&self, key: &str) -> bool {
        self.0.keys().any(|known| known == key || known.strip_prefix(key).is_some_and(|rest| rest.starts_with('.')))
    }

    /// Whether the name of a component (at `name_key`) comes from an argument or an environment variable, but its
    /// option (at `option_key`) from a file. The file may then have meant the component that was replaced.
    pub(super) fn is_renamed(&self, name_key: &str, option_key: &str) -> bool {
        let origin_of_option = self.place(option_key);
        self.is_of_this_call(name_key) && !is_of_this_call(origin_of_option.trim_start_matches(" ("))
    }

    /// Whether an argument or an environment variable set `key`, and not a file.
    pub fn is_of_this_call(&self, key: &str) -> bool {
        self.explicit(key).is_some_and(is_of_this_call)
    }

    /// Whether `origin` is the origin of `key`, or of the nearest key above it if `key` has no origin of its own.
    pub(super) fn is_from(&self, key: &str, origin: &Option<String>) -> bool {
        let key_and_above = std::iter::successors(Some(key), |key| key.rsplit_once('.').map(|(above, _)| above));
        key_and_above.filter_map(|key| self.explicit(key)).next() == origin.as_deref()
    }

    /// The origin of `key` itself; `None` for a default, and for a key of which only the map that contains it has an
    /// origin.
    pub(super) fn explicit(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// The error with the origin of its key at the end of its message.
    pub(super) fn with_place(&self, error: Error) -> Error {
        match error {
            Error::Config { key, problem } => Error::Config { problem: format!("{problem}{}", self.place(&key)), key },
            other => other,
        }
    }

    /// " (origin)" for the end of a message: the origin of `key`, or else of the first key below it, or else of the
    /// nearest key above it. Empty if none of these keys has an origin.
    pub(super) fn place(&self, key: &str) -> String {
        let prefix = format!("{key}.");
        // The keys are sorted, so keys with the prefix begin here.
        let first_below = self.0.range(prefix.clone()..).next().filter(|(known, _)| known.starts_with(&prefix));
        if let Some((_, origin)) = first_below {
            return format!(" ({})", self.explicit(key).unwrap_or(origin));
        }
        let mut key = key;
        loop {
            if let Some(origin) = self.explicit(key) {
                return format!(" ({origin})");
            }
            match key.rsplit_once('.') {
                Some((parent, _)) => key = parent,
                None => return String::new(),
            }
        }
    }
}

/// The value of `key` as JSON with sorted keys. Records the origin of each value in `provenance`.
pub(super) fn to_json(value: Value, key: &str, provenance: &mut Provenance) -> Json {
    if let Some(origin) = value.origin() {
        provenance.note(key, origin.into());
    }
    match value.kind {
        ValueKind::Nil => Json::Null,
        ValueKind::Boolean(b) => b.into(),
        ValueKind::I64(i) => i.into(),
        ValueKind::U64(u) => u.into(),
        ValueKind::I128(i) => (i as f64).into(),
        ValueKind::U128(u) => (u as f64).into(),
        ValueKind::Float(f) => f.into(),
        ValueKind::String(s) => s.into(),
        ValueKind::Array(items) => {
            items.into_iter().enumerate().map(|(i, item)| to_json(item, &child(key, i), provenance)).collect()
        }
        ValueKind::Table(map) => {
            let items: BTreeMap<_, _> = map.into_iter().collect();
            let item = |(name, item): (String, Value)| {
                let json = to_json(item, &child(key, &name), provenance);
                (name, json)
            };
            Json::Object(items.into_iter().map(item).collect())
        }
    }
}

/// Whether `origin` is an argument or an environment variable.
fn is_of_this_call(origin: &str) -> bool {
    origin.starts_with("--") || origin.starts_with("environment variable")
}
