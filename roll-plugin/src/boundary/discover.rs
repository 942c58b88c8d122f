//! Discovers plugins in the directories of a search path.

use std::ffi::OsStr;
use std::path::PathBuf;

use super::{Plugin, load};
use crate::PATH_VARIABLE;

/// Loads the plugins in `directories` (a value of [`PATH_VARIABLE`]). A library that cannot be loaded is logged and
/// left out, because a directory may hold other libraries, and a broken one must not stop a run that does not use it.
pub fn discover(directories: &OsStr) -> Vec<Plugin> {
    let mut plugins = Vec::new();
    for directory in std::env::split_paths(directories).filter(|d| !d.as_os_str().is_empty()) {
        let files = match std::fs::read_dir(&directory) {
            Ok(entries) => entries.filter_map(|e| Some(e.ok()?.path())),
            Err(error) => {
                tracing::warn!("{PATH_VARIABLE}: cannot read {}: {error}", directory.display());
                continue;
            }
        };
        let is_library = |path: &PathBuf| path.extension() == Some(OsStr::new(std::env::consts::DLL_EXTENSION));
        let mut files: Vec<PathBuf> = files.filter(is_library).collect();
        files.sort();
        for file in files {
            match load(&file) {
                Ok(plugin) => plugins.push(plugin),
                Err(error) => tracing::warn!("{PATH_VARIABLE}: left out: {}", crate::one_line(&error)),
            }
        }
    }
    plugins
}
