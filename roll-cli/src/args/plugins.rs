//! Arguments of `roll plugins`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand};

use super::ConfigArgs;

/// Arguments of `roll plugins`.
#[derive(Debug, ClapArgs)]
pub struct Plugins {
    #[command(subcommand)]
    pub action: Option<PluginsAction>,
}

/// What to do with plugins.
#[derive(Debug, Subcommand)]
pub enum PluginsAction {
    /// List every component, linked in or from a plugin.
    List(ConfigArgs),
    /// Show the components of a plugin, or a built-in component, with their options and defaults.
    Info {
        /// The library, or the name of a component: `insightface`.
        #[arg(value_name = "LIBRARY or NAME")]
        path: PathBuf,
    },
    /// Load a plugin, run its rewards on random videos, and compare their pullbacks with differences.
    Check(CheckPlugin),
}

/// Arguments of `roll plugins check`.
#[derive(Debug, ClapArgs)]
pub struct CheckPlugin {
    /// The library, or the name of a built-in reward.
    #[arg(value_name = "LIBRARY or NAME")]
    pub path: PathBuf,
    /// An option of the components, `scale=0.1`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Only the component of this name.
    #[arg(long, value_name = "NAME")]
    pub component: Option<String>,
    /// Key of the random videos.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}
