//! The two trees of a translation: ROLL's, which knows the keys taken from it, and ours.

use std::collections::BTreeSet;
use std::path::Path;

use config::{Value, ValueKind};

use super::super::compose::merge;
use super::super::yaml::Map;

/// ROLL's configuration. It remembers which keys were taken, so that the others can be listed.
pub struct Source {
    root: Value,
    taken: BTreeSet<String>,
}

impl Source {
    pub fn new(map: Map) -> Self {
        Self { root: Value::new(None, ValueKind::Table(map)), taken: BTreeSet::new() }
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        key.split('.').try_fold(&self.root, |value, name| match &value.kind {
            ValueKind::Table(map) => map.get(name),
            _ => None,
        })
    }

    /// The value of a key, which now counts as taken over.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        let value = self.get(key)?.clone();
        self.taken.insert(key.to_string());
        Some(value)
    }

    /// The keys that were not taken, the shortest for each; without the blocks of other files, which are there only to
    /// be referred to.
    pub fn unused(&self, path: &Path) -> Vec<String> {
        let mut unused = Vec::new();
        let own = path.display().to_string();
        if let ValueKind::Table(map) = &self.root.kind {
            for (key, value) in map {
                if value.origin().is_none_or(|origin| origin.starts_with(&own)) {
                    self.walk(key, value, &mut unused);
                }
            }
        }
        unused.sort();
        unused
    }

    /// How many values of the file itself were taken, and how many were not.
    pub fn counts(&self, path: &Path) -> (usize, usize) {
        let own = path.display().to_string();
        let (mut taken, mut left) = (0, 0);
        let mut open: Vec<(String, &Value)> = match &self.root.kind {
            ValueKind::Table(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
            _ => Vec::new(),
        };
        open.retain(|(_, value)| value.origin().is_none_or(|origin| origin.starts_with(&own)));
        while let Some((key, value)) = open.pop() {
            match &value.kind {
                _ if self.taken.contains(&key) => taken += leaves(value),
                ValueKind::Table(map) if !map.is_empty() => {
                    open.extend(map.iter().map(|(name, value)| (format!("{key}.{name}"), value)));
                }
                _ => left += 1,
            }
        }
        (taken, left)
    }

    fn walk(&self, key: &str, value: &Value, unused: &mut Vec<String>) {
        let below = format!("{key}.");
        let partly = self.taken.range(below.clone()..).next().is_some_and(|taken| taken.starts_with(&below));
        match &value.kind {
            _ if self.taken.contains(key) => {}
            ValueKind::Table(map) if partly => {
                map.iter().for_each(|(name, value)| self.walk(&format!("{key}.{name}"), value, unused));
            }
            _ => unused.push(key.to_string()),
        }
    }
}

/// Values in a tree; a list is one.
fn leaves(value: &Value) -> usize {
    match &value.kind {
        ValueKind::Table(map) if !map.is_empty() => map.values().map(leaves).sum(),
        _ => 1,
    }
}

/// The same in this project's keys.
pub struct Target(Value);

impl Target {
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
        merge(&mut self.0, nested);
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        key.split('.').try_fold(&self.0, |value, name| match &value.kind {
            ValueKind::Table(map) => map.get(name),
            _ => None,
        })
    }

    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }
}
