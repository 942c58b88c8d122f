//! Options that are accepted and have no effect beside others: a component says so in a note.
//!
//! A value that can only be a mistake is an error. A value that changes nothing is a note, which a run prints once at its
//! start. Only values other than the defaults are worth a word: the configuration that a run leaves holds every default.

use serde_json::Value as Json;

use crate::{Kind, Options, Result};

/// The notes of a component on the configuration around it. Submit with `inventory::submit!`, beside the
/// [`crate::Registration`] of the same kind and name.
pub struct OptionNotes {
    /// The kind of the component.
    pub kind: Kind,
    /// Its name.
    pub name: &'static str,
    /// A sentence for each key without effect, which names it in full (`model.lora_alpha`). Fails on values that can
    /// only be mistakes. It is called once for each component of this name, before any is made.
    pub notes: fn(&ConfiguredOptions<'_>) -> Result<Vec<String>>,
}

inventory::collect!(OptionNotes);

impl OptionNotes {
    /// Those of the component of this kind and name, as it is linked in.
    pub fn of(kind: Kind, name: &str) -> impl Iterator<Item = &'static Self> {
        inventory::iter::<Self>.into_iter().filter(move |notes| notes.kind == kind && notes.name == name)
    }
}

/// A whole configuration beside its defaults, as keys with dots find it.
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

    /// The value of `key`; `None` where there is none, or `null`.
    pub fn value(&self, key: &str) -> Option<&'a Json> {
        find(self.config, key).filter(|value| !value.is_null())
    }

    /// Whether `key` has the value `true`.
    pub fn is_on(&self, key: &str) -> bool {
        self.value(key) == Some(&Json::Bool(true))
    }

    /// Whether `key` has the text `text`.
    pub fn is(&self, key: &str, text: &str) -> bool {
        self.value(key).is_some_and(|value| value == text)
    }

    /// Whether `key`, or something below it, has another value than by default.
    pub fn changed(&self, key: &str) -> bool {
        let plain = |tree| find(tree, key).filter(|value| !value.is_null());
        match (plain(self.config), plain(self.defaults)) {
            // 1 and 1.0 are one value.
            (Some(Json::Number(a)), Some(Json::Number(b))) => a.as_f64() != b.as_f64(),
            (found, default) => found != default,
        }
    }

    /// The keys directly below `section` that have another value than by default, in full.
    pub fn changed_below(&self, section: &str) -> Vec<String> {
        let keys = find(self.config, section).and_then(Json::as_object).into_iter().flat_map(|map| map.keys());
        keys.map(|key| format!("{section}.{key}")).filter(|key| self.changed(key)).collect()
    }

    /// Those of `keys` that have another value than by default, with it, as a message names them: "`a.b: 3` and `a.c: 4`
    /// have". `None` when all have their defaults.
    pub fn named(&self, keys: &[&str]) -> Option<String> {
        let changed = keys.iter().filter(|key| self.changed(key));
        let shown: Vec<String> =
            changed.map(|key| format!("`{key}: {}`", self.value(key).map_or("null".into(), brief))).collect();
        match shown.split_last() {
            None => None,
            Some((only, [])) => Some(format!("{only} has")),
            Some((last, rest)) => Some(format!("{} and {last} have", rest.join(", "))),
        }
    }

    /// The sentence that `keys` have no effect, unless all have their defaults; `because` ends it.
    pub fn idle(&self, keys: &[&str], because: &str) -> Option<String> {
        self.named(keys).map(|named| format!("{named} no effect: {because}"))
    }
}

fn find<'a>(tree: &'a Options, key: &str) -> Option<&'a Json> {
    let mut parts = key.split('.');
    let first = tree.get(parts.next()?)?;
    parts.try_fold(first, |tree, part| match tree {
        Json::Array(items) => items.get(part.parse::<usize>().ok()?),
        tree => tree.get(part),
    })
}

/// A value on one line; a long one is cut.
fn brief(value: &Json) -> String {
    const MOST: usize = 40;
    let text = match value {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn said(check: impl Fn(ConfiguredOptions<'_>)) {
        let of = |value: Json| value.as_object().unwrap().clone();
        let defaults = of(json!({"model": {"rank": 32, "alpha": null, "shift": 5.0}, "reward": [], "seed": 1}));
        let config = of(json!({"model": {"rank": 0, "alpha": 4, "shift": 5}, "reward": [{"name": "a"}], "seed": 1}));
        check(ConfiguredOptions::new(&config, &defaults));
    }

    #[test]
    fn only_values_other_than_the_defaults_are_changed() {
        said(|said| {
            assert_eq!(said.changed_below("model"), ["model.rank", "model.alpha"]);
            assert!(!said.changed("model.shift") && !said.changed("nosuch.key") && said.changed("reward"));
            assert_eq!(said.value("reward.0.name"), Some(&json!("a")));
        });
    }

    #[test]
    fn a_sentence_names_the_keys_with_their_values() {
        said(|said| {
            let keys = ["model.rank", "model.alpha", "model.shift"];
            let told = said.idle(&keys, "all weights are trained").unwrap();
            assert_eq!(told, "`model.rank: 0` and `model.alpha: 4` have no effect: all weights are trained");
            assert_eq!(said.idle(&["model.alpha"], "x").unwrap(), "`model.alpha: 4` has no effect: x");
            assert_eq!(said.idle(&["model.shift"], "x"), None);
        });
    }
}
