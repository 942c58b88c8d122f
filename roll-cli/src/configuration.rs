//! The configuration of a command, from files, the environment and arguments, and the components it may name.

use std::path::Path;

use roll_core::{BuildContext, Error, Registry, Replaces, Result};
use roll_train::config::{ConfigLayers, LoadedConfig, MergedConfig};
use roll_train::run_dir::RunDir;

use crate::args::{ConfigArgs, GivenValue};
use crate::{demo, ranks};

/// A configuration that was read and not checked yet.
pub struct Configuration {
    layers: ConfigLayers,
    merged: MergedConfig,
}

impl Configuration {
    /// Reads files, environment, and arguments; `extra` are those of one command: key, value, name of the argument.
    pub fn read(args: &ConfigArgs, extra: &[(&str, String, &str)]) -> Result<Self> {
        Self::read_for(args, extra, ranks::process().world_size())
    }

    /// As [`Configuration::read`], for a job with this number of ranks.
    pub fn read_for(args: &ConfigArgs, extra: &[(&str, String, &str)], ranks: usize) -> Result<Self> {
        let mut layers = ConfigLayers::new().for_ranks(ranks);
        if let Some(run) = &args.run {
            layers = layers.file_of_run(run.config_path(), args.trust)?;
        }
        for file in &args.layers.files {
            layers = match RunDir::has_config(file) {
                _ if file.is_dir() => return Err(directory_as_file(file)),
                true => layers.file_of_run(file, args.trust)?,
                false => layers.file(file)?,
            };
        }
        layers = layers.environment(std::env::vars())?;
        for value in &args.layers.values {
            layers = match value {
                GivenValue::Assignment(assignment) => layers.set(assignment)?,
                GivenValue::OfKey(key, value, origin) => layers.set_text(key, value, origin)?,
                GivenValue::Unset(key) => layers.set_text(key, "null", "--unset")?,
            };
        }
        if args.plugins_replace {
            layers = layers.set_text("plugins_replace", "true", "--plugins-replace")?;
        }
        if !args.plugins.is_empty() {
            let mut paths = layers.merge()?.plugins()?.0;
            paths.extend(args.plugins.iter().cloned());
            let list: Vec<_> = paths.iter().map(|p| p.to_string_lossy()).collect();
            layers = layers.set_text("plugins", &serde_json::json!(list).to_string(), "--plugin")?;
        }
        for (key, value, origin) in extra {
            layers = layers.set_text(key, value, origin)?;
        }
        Self::of(layers)
    }

    fn of(layers: ConfigLayers) -> Result<Self> {
        let merged = layers.merge()?;
        Ok(Self { layers, merged })
    }

    /// The built-in components, those of the plugins that the configuration names, and those in the directories of
    /// `ROLL_PLUGIN_PATH`.
    pub fn registry(&self) -> Result<Registry> {
        let (paths, replace) = self.merged.plugins()?;
        let replaces = if replace { Replaces::LinkedIn } else { Replaces::Nothing };
        let mut registry = Registry::linked()?;
        for path in paths {
            registry = registry.with_components(&roll_plugin::load(path)?.registrations(), replaces)?;
        }
        for found in std::env::var_os(roll_plugin::PATH_VARIABLE).iter().flat_map(|dirs| roll_plugin::discover(dirs)) {
            registry = registry.with_components(&found.registrations(), replaces)?;
        }
        Ok(registry)
    }

    /// The same on top of `lowest`.
    pub fn over(self, lowest: ConfigLayers) -> Result<Self> {
        Self::of(self.layers.over(lowest))
    }

    /// The same on top of a demo where it names neither a model nor data.
    pub fn or_demo(self) -> Result<Self> {
        match demo::layers(&self.merged)? {
            Some(demo) => self.over(demo),
            None => Ok(self),
        }
    }

    pub fn algorithm(&self) -> Option<&str> {
        self.merged.peek("algo.name")?.as_str()
    }

    /// As [`demo::why_not_demo`].
    pub fn why_not_demo(&self) -> Option<demo::NotDemo> {
        demo::why_not_demo(&self.merged)
    }

    /// Checks it, with the options of components, and logs its notes.
    pub fn load(self, registry: &Registry) -> Result<LoadedConfig> {
        let loaded = self.merged.load(Some(registry))?;
        for note in &loaded.notes {
            tracing::warn!("{note}");
        }
        Ok(loaded)
    }
}

/// The error on a directory where a configuration file is expected.
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
