//! Scores of earlier answers, one file each.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use roll_backends::cache_directory;
use roll_core::{BuildContext, Error, Result};
use roll_external::files;
use serde::{Deserialize, Serialize};

/// A directory of scores, which several runs and ranks may share and which may be emptied at any time.
pub(super) struct AnswerCache {
    directory: PathBuf,
    is_unwritable: AtomicBool,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    score: f64,
}

impl AnswerCache {
    /// The cache of `reward.cache_dir`, if it has one; creates no directory. Fails if it cannot be a directory.
    pub fn open(option: Option<&str>, context: &BuildContext) -> Result<Option<Self>> {
        let parent = match option {
            None | Some("none" | "") => None,
            Some("auto") => cache_directory::of(|name| std::env::var_os(name)),
            Some(path) => {
                let path = context.resolve(path);
                if let Some(file) = path.ancestors().find(|path| path.exists() && !path.is_dir()) {
                    let problem = format!("expected a directory, found the file {}", file.display());
                    return Err(Error::config("reward.cache_dir", problem));
                }
                Some(path)
            }
        };
        Ok(parent.map(|parent| Self { directory: parent.join("judge"), is_unwritable: AtomicBool::new(false) }))
    }

    /// Keys are hexadecimal.
    fn path(&self, key: &str) -> PathBuf {
        self.directory.join(&key[..2]).join(format!("{key}.json"))
    }

    /// The score of `key`; `None` without one, or if the file is damaged.
    pub fn get(&self, key: &str) -> Option<f64> {
        let path = self.path(key);
        let bytes = path.exists().then(|| files::read(&path, 1024))?;
        let entry: Option<Entry> = bytes.ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let score = entry.map(|entry| entry.score).filter(|score| (0.0..=1.0).contains(score));
        if score.is_none() {
            tracing::warn!("asked again, and replaced: {} is damaged", path.display());
        }
        score
    }

    /// Keeps a score. Failing to write it is only a warning.
    pub fn put(&self, key: &str, score: f64) {
        if let Err(error) = write(&self.path(key), &Entry { score })
            && !self.is_unwritable.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("answers are not kept (`reward.cache_dir`): {}", error.chain());
        }
    }
}

fn write(path: &Path, entry: &Entry) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder).map_err(Error::file("create the directory", folder))?;
    let bytes = serde_json::to_vec(entry).map_err(Error::failed("a score cannot be written as JSON"))?;
    files::write_atomically(path, &bytes)
}
