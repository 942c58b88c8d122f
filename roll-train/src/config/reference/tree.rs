//! The two trees of a translation: ROLL's, which records the keys that were taken from it, and ours.

use std::collections::BTreeSet;
use std::path::Path;

use config::{Value, ValueKind};

use super::super::merge::merge;
use super::super::yaml::{Map, find};

/// ROLL's configuration. It records which keys were taken, so that the remaining keys can be listed.
pub struct ReferenceTree {
    root: Value,
    /// Dotted keys that were taken.
    taken: BTreeSet<String>,
}

impl ReferenceTree {
    pub fn new(map: Map) -> Self {
        Self { root: Value::new(None, ValueKind::Table(map)), taken: BTreeSet::new() }
    }

    /// The value of a dotted key, without counting it as taken.
    pub fn get(&self, key: &str) -> Option<&Value> {
        find(&self.root, key)
    }

    /// The value of a key, which now counts as taken.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        let value = self.get(key)?.clone();
        self.taken.insert(key.to_string());
        Some(value)
    }

    /// The keys in the file at `path` that were not taken. A map from which nothing was taken is listed as one key.
    pub fn unused(&self, path: &Path) -> Vec<String> {
        let mut unused = Vec::new();
        self.entries_of(path).for_each(|(key, value)| self.add_unused(key, value, &mut unused));
        unused.sort();
        unused
    }

    /// The numbers of values in the file at `path` that were taken, and that were not. `unused` is the result of
    /// [`ReferenceTree::unused`].
    pub fn counts(&self, path: &Path, unused: &[String]) -> (usize, usize) {
        let all: usize = self.entries_of(path).map(|(_, value)| leaves(value)).sum();
        let not_taken = unused.iter().map(|key| self.get(key).map_or(1, leaves)).sum();
        (all.saturating_sub(not_taken), not_taken)
    }

    /// The top-level entries that come from the file at `path`, not from the files that its `defaults` name. Entries of
    /// those files only serve interpolations.
    fn entries_of(&self, path: &Path) -> impl Iterator<Item = (&String, &Value)> {
        let file = path.display().to_string();
        let map = if let ValueKind::Table(map) = &self.root.kind { Some(map) } else { None };
        map.into_iter()
            .flatten()
            .filter(move |(_, value)| value.origin().is_none_or(|origin| origin.starts_with(&file)))
    }

    /// Adds `key`, whose value is `value`, or the keys below it that were not taken.
    fn add_unused(&self, key: &str, value: &Value, unused: &mut Vec<String>) {
        let prefix = format!("{key}.");
        // `taken` is sorted, so keys with the prefix begin here.
        let next_taken = self.taken.range(prefix.clone()..).next();
        let is_taken_in_part = next_taken.is_some_and(|taken| taken.starts_with(&prefix));
        match &value.kind {
            _ if self.taken.contains(key) => {}
            ValueKind::Table(map) if is_taken_in_part => {
                map.iter().for_each(|(name, value)| self.add_unused(&format!("{key}.{name}"), value, unused));
            }
            _ => unused.push(key.to_string()),
        }
    }
}

/// The number of values in a tree. A list counts as one value, and so does an empty map.
fn leaves(value: &Value) -> usize {
    match &value.kind {
        ValueKind::Table(map) if !map.is_empty() => map.values().map(leaves).sum(),
        _ => 1,
    }
}

/// The translated configuration in this project's keys: always a map.
pub struct TranslatedTree(Value);

impl TranslatedTree {
    pub fn new() -> Self {
        Self(Value::new(None, ValueKind::Table(Map::new())))
    }

    pub fn into_map(self) -> Map {
        match self.0.kind {
            ValueKind::Table(map) => map,
            _ => Map::new(),
        }
    }

    /// Sets a dotted key; maps merge.
    pub fn put(&mut self, key: &str, value: Value) {
        let nested = key
            .rsplit('.')
            .fold(value, |inner, name| Value::new(None, ValueKind::Table(Map::from([(name.to_string(), inner)]))));
        merge(&mut self.0, "", nested);
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        find(&self.0, key)
    }

    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }
}
