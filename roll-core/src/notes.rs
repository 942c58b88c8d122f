//! Notes on keys of a configuration that have no effect because of the values of other keys. A component lists such
//! keys in a table ([`IdleKeys`]), and registers it as its [`OptionNotes`].
//!
//! A value that can only be a mistake is an error. A value that changes nothing is a note, which a run logs once at its
//! start. A key with its default value is not noted, because the configuration in a run directory holds every default.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use crate::error::shortened;
use crate::{Kind, Options, Result};

/// Maximum number of characters of a value in a note.
const MAX_VALUE_CHARS: usize = 40;

/// A row of a component's table: keys that have no effect because of the value of another key.
#[derive(Clone, Copy, Debug)]
pub struct IdleKeys {
    /// The keys, in full; `data.*` is every key of a section.
    pub keys: &'static [&'static str],
    /// The condition under which they have no effect.
    pub when: When,
    /// The reason, which ends the sentence "`model.shift: 4` has no effect: ".
    pub because: &'static str,
}

/// A condition on the value of one key. Values are compared as text: `true`, `0`, `gae`, `[]`; a key that is not set is
/// `null`.
#[derive(Clone, Copy, Debug)]
pub enum When {
    /// Holds whatever the values are.
    Always,
    /// The key has one of these values.
    Is(&'static str, &'static [&'static str]),
    /// The key has none of these values.
    IsNot(&'static str, &'static [&'static str]),
}

/// The notes of a component on the configuration around it. Submit with `inventory::submit!`, next to the
/// [`crate::Registration`] of the same kind and name.
pub struct OptionNotes {
    /// The kind of the component.
    pub kind: Kind,
    /// Its name.
    pub name: &'static str,
    /// Keys without effect. A key is noted once, by the first row that applies.
    pub idle: &'static [IdleKeys],
    /// Returns notes that a table cannot express; fails on values that can only be mistakes. Called once for each
    /// component of this name, before any component is made.
    pub more: Option<fn(&ConfiguredOptions<'_>) -> Result<Vec<String>>>,
}

inventory::collect!(OptionNotes);

impl OptionNotes {
    /// The notes on `config` of the linked component of this kind and name.
    pub fn of(kind: Kind, name: &str, config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        for component in inventory::iter::<Self>.into_iter().filter(|notes| notes.kind == kind && notes.name == name) {
            notes.extend(config.idle(component.idle));
            if let Some(more) = component.more {
                notes.extend(more(config)?);
            }
        }
        Ok(notes)
    }
}

/// A whole configuration and its defaults, by dotted keys.
#[derive(Clone, Copy, Debug)]
pub struct ConfiguredOptions<'a> {
    config: &'a Options,
    defaults: &'a Options,
}

impl<'a> ConfiguredOptions<'a> {
    /// `config` has every default filled in; `defaults` has the same sections, with the defaults of the components that
    /// `config` names.
    pub fn new(config: &'a Options, defaults: &'a Options) -> Self {
        Self { config, defaults }
    }

    /// The value of `key`; `None` if it is missing or `null`.
    pub fn value(&self, key: &str) -> Option<&'a Json> {
        find(self.config, key).filter(|value| !value.is_null())
    }

    /// Whether `key`, or a key below it, has another value than by default.
    pub fn changed(&self, key: &str) -> bool {
        let set_value = |tree| find(tree, key).filter(|value| !value.is_null());
        match (set_value(self.config), set_value(self.defaults)) {
            // 1 and 1.0 are one value.
            (Some(Json::Number(a)), Some(Json::Number(b))) => a.as_f64() != b.as_f64(),
            (found, default) => found != default,
        }
    }

    /// One sentence for each row of `table` that applies to a key with another value than by default.
    pub fn idle(&self, table: &[IdleKeys]) -> Vec<String> {
        let mut noted = BTreeSet::new();
        let rows = table.iter().filter(|row| self.applies(row.when));
        let sentences = rows.filter_map(|row| {
            let keys = row.keys.iter().flat_map(|key| self.keys(key));
            let not_noted_before: Vec<String> = keys.filter(|key| noted.insert(key.clone())).collect();
            Some(format!("{} no effect: {}", self.named(&not_noted_before)?, row.because))
        });
        sentences.collect()
    }

    /// The keys among `keys` whose value is not the default, each with its value, as the subject and verb of a
    /// sentence: "`a.b: 3` and `a.c: 4` have". `None` if all have their defaults.
    pub fn named<K: AsRef<str>>(&self, keys: &[K]) -> Option<String> {
        let changed = keys.iter().map(AsRef::as_ref).filter(|key| self.changed(key));
        let value = |key: &str| shortened(text(find(self.config, key)), MAX_VALUE_CHARS);
        let shown: Vec<String> = changed.map(|key| format!("`{key}: {}`", value(key))).collect();
        match shown.split_last() {
            None => None,
            Some((only, [])) => Some(format!("{only} has")),
            Some((last, rest)) => Some(format!("{} and {last} have", rest.join(", "))),
        }
    }

    fn applies(&self, when: When) -> bool {
        let has_one_of = |key: &str, values: &[&str]| {
            let found = match find(self.config, key) {
                // 1 and 1.0 are one value.
                Some(Json::Number(number)) => number.as_f64().unwrap_or(f64::NAN).to_string(),
                other => text(other),
            };
            values.contains(&found.as_str())
        };
        match when {
            When::Always => true,
            When::Is(key, values) => has_one_of(key, values),
            When::IsNot(key, values) => !has_one_of(key, values),
        }
    }

    /// `key`, or the keys of the section that `section.*` names.
    fn keys(&self, key: &str) -> Vec<String> {
        match key.strip_suffix(".*") {
            None => vec![key.to_string()],
            Some(section) => {
                let names = find(self.config, section).and_then(Json::as_object).into_iter().flat_map(|map| map.keys());
                names.map(|name| format!("{section}.{name}")).collect()
            }
        }
    }
}

/// The value at the dotted `key`, in which a number names an entry of a list.
fn find<'a>(tree: &'a Options, key: &str) -> Option<&'a Json> {
    let mut parts = key.split('.');
    let section = tree.get(parts.next()?)?;
    parts.try_fold(section, |value, part| match value {
        Json::Array(items) => items.get(part.parse::<usize>().ok()?),
        map => map.get(part),
    })
}

/// A value as a message shows it; a missing one is `null`.
fn text(value: Option<&Json>) -> String {
    match value {
        Some(Json::String(text)) => text.clone(),
        other => other.unwrap_or(&Json::Null).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn configured(check: impl Fn(ConfiguredOptions<'_>)) {
        let of = |value: Json| value.as_object().unwrap().clone();
        let defaults = of(json!({"model": {"rank": 32, "alpha": null, "shift": 5.0}, "reward": [], "seed": 1}));
        let config = of(json!({"model": {"rank": 0.0, "alpha": 4, "shift": 5}, "reward": [{"name": "a"}], "seed": 1}));
        check(ConfiguredOptions::new(&config, &defaults));
    }

    #[test]
    fn changed_compares_with_the_defaults() {
        configured(|config| {
            assert!(config.changed("model.rank") && config.changed("model.alpha") && config.changed("reward"));
            assert!(!config.changed("model.shift") && !config.changed("nosuch.key"));
            assert_eq!(config.value("reward.0.name"), Some(&json!("a")));
            assert_eq!(config.named(&["model.shift"]), None);
            assert_eq!(config.named(&["model.alpha"]).unwrap(), "`model.alpha: 4` has");
        });
    }

    #[test]
    fn idle_names_each_changed_key_once() {
        let row = |keys, when| IdleKeys { keys, when, because: "all weights are trained" };
        configured(|config| {
            let notes = |when| config.idle(&[row(&["model.*"], when), row(&["model.alpha"], When::Always)]);
            let alone = ["`model.alpha: 4` has no effect: all weights are trained"];
            let both = ["`model.rank: 0.0` and `model.alpha: 4` have no effect: all weights are trained"];
            assert_eq!(notes(When::Always), both);
            assert_eq!(notes(When::Is("model.rank", &["0"])), both);
            assert_eq!(notes(When::IsNot("reward.0.name", &["b", "null"])), both);
            assert_eq!(notes(When::IsNot("model.rank", &["1", "0"])), alone);
            assert_eq!(notes(When::Is("model.nosuch", &["0"])), alone);
            assert_eq!(notes(When::Is("model.nosuch", &["null"])), both);
        });
    }
}
