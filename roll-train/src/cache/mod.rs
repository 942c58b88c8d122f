//! `data.cache_dir`: encodings of prompts and clips, and the rewards' targets, kept beyond a run.
//!
//! Model and reward are wrapped; algorithms see no difference. Entries are found by the inputs of their computation:
//! the networks, their settings, and the input, pixel by pixel.

mod limit;
mod model;
mod reward;
mod store;

use std::ffi::OsString;
use std::path::PathBuf;

use roll_core::Result;
use roll_data::{CacheDir, DataConfig};

pub use model::CachedModel;
pub use reward::CachedReward;
pub use store::CacheStore;

/// The environment variable that names the directory for runs whose configuration does not.
pub const VARIABLE: &str = "ROLL_CACHE";

/// The store of a run, if it has one. A directory that was asked for and cannot be made is an error; the default one only
/// leaves a note.
pub fn open(config: &DataConfig) -> Result<Option<CacheStore>> {
    match &config.cache_dir {
        CacheDir::Off => Ok(None),
        CacheDir::At(path) => CacheStore::open(path, config.cache_limit).map(Some),
        CacheDir::Auto => {
            let Some(path) = default_directory(|name| std::env::var_os(name)) else { return Ok(None) };
            match CacheStore::open(&path, config.cache_limit) {
                Ok(store) => Ok(Some(store)),
                Err(error) => {
                    tracing::info!("encodings are not kept: {}", error.chain());
                    Ok(None)
                }
            }
        }
    }
}

/// Where `data.cache_dir: auto` is; nowhere without a home directory.
fn default_directory(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    match given(VARIABLE) {
        Some(path) if path.as_os_str() == "none" => None,
        Some(path) => Some(path),
        None => {
            // As the specification of these directories has it, a relative path is none.
            let caches = given("XDG_CACHE_HOME").filter(|path| path.is_absolute());
            Some(caches.or_else(|| Some(given("HOME")?.join(".cache")))?.join("roll"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_directory_is_that_of_the_environment() {
        let at = |variables: &[(&str, &str)]| {
            let of = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            default_directory(of)
        };
        assert_eq!(at(&[("HOME", "/home/a")]), Some("/home/a/.cache/roll".into()));
        assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "/c")]), Some("/c/roll".into()));
        assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "c")]), Some("/home/a/.cache/roll".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (VARIABLE, "/mine")]), Some("/mine".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (VARIABLE, "none")]), None);
        assert_eq!(at(&[]), None);
    }
}
