//! The two trees of a translation: ROLL's, which records the keys taken from it, and ours.

use std::collections::BTreeSet;
use std::path::Path;

use config::{Value, ValueKind};

use super::super::merge::merge;
use super::super::yaml::{Map, find};

/// ROLL's configuration. It records which keys were taken, so that the others can be listed.
pub struct ReferenceTree {
    root: Value,
    taken: BTreeSet<String>,
}

impl ReferenceTree {
    pub fn new(map: Map) -> Self {
        Self { root: Value::new(None, ValueKind::Table(map)), taken: BTreeSet::new() }
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        find(&self.root, key)
    }

    /// The value of a key, which now counts as taken.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        let value = self.get(key)?.clone();
        self.taken.insert(key.to_string());
        Some(value)
    }

    /// The keys that were not taken; a map of which nothing was taken is one key.
    pub fn unused(&self, path: &Path) -> Vec<String> {
        let mut unused = Vec::new();
        self.entries_of(path).for_each(|(key, value)| self.add_unused(key, value, &mut unused));
        unused.sort();
        unused
    }

    /// The numbers of values that were taken, and of those below the keys `unused`.
    pub fn counts(&self, path: &Path, unused: &[String]) -> (usize, usize) {
        let all: usize = self.entries_of(path).map(|(_, value)| leaves(value)).sum();
        let left = unused.iter().map(|key| self.get(key).map_or(1, leaves)).sum();
        (all.saturating_sub(left), left)
    }

    /// The top-level entries of the file at `path`; those of other files are only there to be referred to.
    fn entries_of(&self, path: &Path) -> impl Iterator<Item = (&String, &Value)> {
        let own = path.display().to_string();
        let map = if let ValueKind::Table(map) = &self.root.kind { Some(map) } else { None };
        map.into_iter().flatten().filter(move |(_, value)| value.origin().is_none_or(|origin| origin.starts_with(&own)))
    }

    fn add_unused(&self, key: &str, value: &Value, unused: &mut Vec<String>) {
        let below = format!("{key}.");
        let partly = self.taken.range(below.clone()..).next().is_some_and(|taken| taken.starts_with(&below));
        match &value.kind {
            _ if self.taken.contains(key) => {}
            ValueKind::Table(map) if partly => {
                map.iter().for_each(|(name, value)| self.add_unused(&format!("{key}.{name}"), value, unused));
            }
            _ => unused.push(key.to_string()),
        }
    }
}

/// The number of values in a tree; a list counts as one.
fn leaves(value: &Value) -> usize {
    match &value.kind {
        ValueKind::Table(map) if !map.is_empty() => map.values().map(leaves).sum(),
        _ => 1,
    }
}

/// The translated configuration, in this project's keys.
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
