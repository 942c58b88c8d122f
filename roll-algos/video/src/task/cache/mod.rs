//! `data.cache_dir`: encodings of prompts and clips, and the rewards' targets, cached beyond a run.
//!
//! Model and reward are wrapped; algorithms see no difference. Entries are found by the inputs of their computation:
//! the networks, their settings, and the input, pixel by pixel.

mod limit;
mod model;
mod reward;
mod store;

use roll_backends::cache_directory;
use roll_core::Result;

use crate::rows::{CacheDir, DataConfig};

pub use model::CachedModel;
pub use reward::CachedReward;
pub use store::CacheStore;

pub use roll_backends::cache_directory::VARIABLE;

/// Fails as [`open`] would, and leaves no directory behind.
pub fn check(config: &DataConfig) -> Result<()> {
    let CacheDir::At(path) = &config.cache_dir else { return Ok(()) };
    let new_directories: Vec<_> = path.ancestors().take_while(|path| !path.exists()).collect();
    CacheStore::open(path, config.cache_limit)?;
    new_directories.iter().for_each(|directory| drop(std::fs::remove_dir(directory)));
    Ok(())
}

/// The store of a run, if it has one. A directory that was asked for and cannot be made is an error; the default one
/// only logs a note.
pub fn open(config: &DataConfig) -> Result<Option<CacheStore>> {
    match &config.cache_dir {
        CacheDir::Off => Ok(None),
        CacheDir::At(path) => CacheStore::open(path, config.cache_limit).map(Some),
        CacheDir::Auto => {
            let Some(path) = cache_directory::of(|name| std::env::var_os(name)) else { return Ok(None) };
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
