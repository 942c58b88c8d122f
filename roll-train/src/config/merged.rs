//! The merged layers of a configuration, some of whose values can be read before all are checked.

use std::path::PathBuf;

use config::Value;
use serde_json::{Map, Value as Json};

use super::RunConfig;
use super::declared::DECLARED;
use super::loaded::LoadedConfig;
use super::provenance::{Provenance, to_json};
use super::secrets::AsWritten;
use super::{schema, trackers};
use roll_core::{Error, Registry, Result, keys};

/// A configuration that is merged but not checked. Names and options of components can be checked only with a registry,
/// and the configuration itself names the plugins of the registry.
#[derive(Clone, Debug)]
pub struct MergedConfig {
    /// All values, defaults too.
    tree: Json,
    /// The origin of each value.
    provenance: Provenance,
    /// Notes for the user.
    notes: Vec<String>,
    /// The values that files interpolate from the environment.
    from_environment: Vec<AsWritten>,
}

impl MergedConfig {
    pub(super) fn new(merged: Value, notes: Vec<String>, from_environment: Vec<AsWritten>) -> Self {
        let mut provenance = Provenance::default();
        let tree = to_json(merged, "", &mut provenance);
        Self { tree, provenance, notes, from_environment }
    }

    /// The values of `plugins` and `plugins_replace`: the libraries to load, and whether their components replace
    /// built-in ones of the same name.
    pub fn plugins(&self) -> Result<(Vec<PathBuf>, bool)> {
        let value = |key: &str| self.tree.get(key).cloned().unwrap_or_default();
        let wrong_type = |key: &str, expected: &str, found: Json| {
            Error::config(key, format!("expected {expected}, found {found}{}", self.provenance.place(key)))
        };
        let plugins = value("plugins");
        let paths =
            serde_json::from_value(plugins.clone()).map_err(|_| wrong_type("plugins", "a list of paths", plugins))?;
        let replace = value("plugins_replace");
        let should_replace =
            replace.as_bool().ok_or_else(|| wrong_type("plugins_replace", "true or false", replace))?;
        Ok((paths, should_replace))
    }

    /// The value of `key`, or the default if no layer sets it; `None` if both are missing or `null`.
    pub fn peek(&self, key: &str) -> Option<&Json> {
        key.split('.').try_fold(&self.tree, |tree, part| tree.get(part)).filter(|value| !value.is_null())
    }

    /// Checks every key and value. With a registry, component names and the options of components are checked too, and
    /// their defaults filled in. The error lists all wrong keys and values that do not depend on one another.
    pub fn load(mut self, registry: Option<&Registry>) -> Result<LoadedConfig> {
        let mut problems = Vec::new();
        loop {
            let error = match self.clone().load_checked(registry) {
                Ok(loaded) if problems.is_empty() => return Ok(loaded),
                Ok(_) => break,
                Err(error) => error,
            };
            // To find further problems, the wrong value is removed, and the rest is checked again with its default.
            let is_removed = match &error {
                Error::Config { key, .. } => remove(&mut self.tree, key),
                _ => false,
            };
            // A later error about a value that cannot be removed may be a consequence of an earlier removal.
            if is_removed || problems.is_empty() {
                problems.push(error);
            }
            if !is_removed {
                break;
            }
        }
        Err(Error::several(problems))
    }

    /// Checks the configuration up to the first problem.
    fn load_checked(self, registry: Option<&Registry>) -> Result<LoadedConfig> {
        let Self { mut tree, provenance, mut notes, from_environment } = self;
        notes.extend(trackers::normalize(&mut tree));
        for section in DECLARED.iter() {
            if let Some(value) = tree.get_mut(section.name) {
                (section.normalize)(value);
            }
        }
        if let Some(registry) = registry {
            schema::fill_learning_rate(&mut tree, registry, &provenance);
        }
        schema::fill_nulls(&mut tree);
        keys::check(&schema::KEYS, &schema::SCHEMA, &mut tree).map_err(|e| provenance.with_place(e))?;
        if let Some(registry) = registry {
            notes.extend(schema::check_components(&mut tree, registry, &provenance)?);
        }
        let mut sections = Map::new();
        for section in DECLARED.iter() {
            let value = tree.as_object_mut().and_then(|tree| tree.shift_remove(section.name));
            let value = value.unwrap_or_else(section.default);
            sections.insert(section.name.into(), (section.read)(&value).map_err(|e| provenance.with_place(e))?);
        }
        let config: RunConfig = serde_path_to_error::deserialize(&tree).map_err(|e| {
            let key = e.path().to_string().replace('[', ".").replace(']', "");
            provenance.with_place(Error::config(key, e.inner().to_string()))
        })?;
        config.check().map_err(|e| provenance.with_place(e))?;
        Ok(LoadedConfig { config, sections, provenance, notes, from_environment })
    }
}

/// Removes the value of a key. Returns false if the key has no value, or if the value is the name of a component,
/// without which the options of the component cannot be checked.
fn remove(tree: &mut Json, key: &str) -> bool {
    let (parent, name) = key.rsplit_once('.').unwrap_or(("", key));
    if name == "name" {
        return false;
    }
    let pointer = if parent.is_empty() { String::new() } else { format!("/{}", parent.replace('.', "/")) };
    let map = tree.pointer_mut(&pointer).and_then(Json::as_object_mut);
    map.is_some_and(|map| map.shift_remove(name).is_some())
}
