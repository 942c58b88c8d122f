//! The configuration of a command, and the components that it may name.
//!
//! [`Configuration::read`] puts the layers of a configuration in their order, each above the one before it: the run
//! that is continued, files, environment, arguments. A command may put a layer of its own below all these layers, such
//! as that of the demo.

use std::path::Path;

use roll_core::{BuildContext, Error, Registry, Replaces, Result};
use roll_train::config::{ConfigLayers, LoadedConfig, MergedConfig};
use roll_train::run_dir::RunDir;

use crate::args::{ConfigArgs, GivenValue, KeyValue};
use crate::{demo, ranks};

/// A configuration that was read and not checked yet.
pub struct Configuration {
    layers: ConfigLayers,
    merged: MergedConfig,
}

impl Configuration {
    /// Reads files, environment, and arguments. `extra` has the values of arguments that only one command has; they are
    /// the highest layer.
    pub fn read(args: &ConfigArgs, extra: &[KeyValue]) -> Result<Self> {
        Self::read_for(args, extra, ranks::process().world_size())
    }

    /// As [`Configuration::read`], for a job with this number of ranks.
    pub fn read_for(args: &ConfigArgs, extra: &[KeyValue], ranks: usize) -> Result<Self> {
        let mut layers = ConfigLayers::new().for_ranks(ranks);
        if let Some(run) = &args.run {
            layers = layers.file_of_run(run.config_path(), args.trust)?;
        }
        for file in &args.layers.files {
            if file.is_dir() {
                return Err(directory_as_file(file));
            }
            // The configuration of a run may be another person's: it needs consent (`--trust`).
            let is_of_run = RunDir::is_config_of_run(file);
            layers = if is_of_run { layers.file_of_run(file, args.trust)? } else { layers.file(file)? };
        }
        layers = layers.environment(std::env::vars())?;
        for value in &args.layers.values {
            layers = match value {
                GivenValue::Assignment(assignment) => layers.set(assignment)?,
                GivenValue::OfKey(KeyValue { key, value, origin }) => layers.set_text(key, value, origin)?,
                GivenValue::Unset(key) => layers.set_text(key, "null", "--unset")?,
            };
        }
        if args.plugins_replace {
            layers = layers.set_text("plugins_replace", "true", "--plugins-replace")?;
        }
        if !args.plugins.is_empty() {
            // `--plugin` adds to the list of the layers below; a value of `plugins` replaces that list.
            let (mut paths, _) = layers.merge()?.plugins()?;
            paths.extend(args.plugins.iter().cloned());
            let list: Vec<_> = paths.iter().map(|p| p.to_string_lossy()).collect();
            layers = layers.set_text("plugins", &serde_json::json!(list).to_string(), "--plugin")?;
        }
        for KeyValue { key, value, origin } in extra {
            layers = layers.set_text(key, value, origin)?;
        }
        Self::of(layers)
    }

    fn of(layers: ConfigLayers) -> Result<Self> {
        let merged = layers.merge()?;
        Ok(Self { layers, merged })
    }

    /// The built-in components, the components of the plugins that the configuration names, and the components of the
    /// plugins in the directories of `ROLL_PLUGIN_PATH`.
    pub fn registry(&self) -> Result<Registry> {
        let (paths, may_replace) = self.merged.plugins()?;
        let replaces = if may_replace { Replaces::Linked } else { Replaces::Nothing };
        let mut registry = Registry::linked()?;
        for path in paths {
            registry = registry.with_components(&roll_plugin::load(path)?.registrations(), replaces)?;
        }
        let directories = std::env::var_os(roll_plugin::PATH_VARIABLE);
        for plugin in directories.iter().flat_map(|directories| roll_plugin::discover(directories)) {
            registry = registry.with_components(&plugin.registrations(), replaces)?;
        }
        Ok(registry)
    }

    /// This configuration with the layer `lowest` below all others.
    pub fn over(self, lowest: ConfigLayers) -> Result<Self> {
        Self::of(self.layers.over(lowest))
    }

    /// This configuration with the demo's as the lowest layer, if it names neither a model nor data; else unchanged.
    pub fn or_demo(self) -> Result<Self> {
        match demo::layers(&self.merged)? {
            Some(demo) => self.over(demo),
            None => Ok(self),
        }
    }

    /// The name of the algorithm, if the configuration has one.
    pub fn algorithm(&self) -> Option<&str> {
        self.merged.peek("algo.name")?.as_str()
    }

    /// As [`demo::why_not_demo`].
    pub fn why_not_demo(&self) -> Option<demo::NotDemo> {
        demo::why_not_demo(&self.merged)
    }

    /// Checks the configuration, the options of components too, and logs notes about it as warnings.
    pub fn load(self, registry: &Registry) -> Result<LoadedConfig> {
        let loaded = self.merged.load(Some(registry))?;
        for note in &loaded.notes {
            tracing::warn!("{note}");
        }
        Ok(loaded)
    }
}

/// The error about a directory that was named where a configuration file is expected.
fn directory_as_file(path: &Path) -> Error {
    let problem = match RunDir::has_run(path) {
        true => {
            "is the directory of a run: its configuration is config.yaml in it, and `roll run --resume` goes on with it"
        }
        false => "is a directory: expected a configuration file (YAML)",
    };
    Error::bad_file(path, problem)
}

/// The context of components on the ranks of this process. Relative paths start from the working directory.
pub fn build_context(loaded: &LoadedConfig) -> BuildContext {
    BuildContext { ranks: ranks::process(), backend: ranks::device(&loaded.config.backend), ..loaded.build_context() }
}
