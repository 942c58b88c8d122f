//! Keeps the directory of cached tensors below its limit.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Maximum age of a file that is being written. Older unfinished files are left over from a killed process.
const MAX_WRITING_AGE: Duration = Duration::from_secs(24 * 3600);

/// An upper limit on the bytes of a directory that several processes use. Each process counts the bytes that it found
/// in the directory and the bytes that it added itself. It lists the directory again when the sum exceeds the limit.
/// Together the processes may exceed the limit by the bytes that they add in between.
#[derive(Debug)]
pub(super) struct Limit {
    directory: PathBuf,
    max_bytes: u64,
    /// The bytes in the directory, as far as this process knows; `None` until it has listed the directory.
    bytes: Mutex<Option<u64>>,
}

/// A file of the directory.
struct CachedFile {
    path: PathBuf,
    bytes: u64,
    /// Time of the last use.
    used: SystemTime,
}

impl Limit {
    pub(super) fn new(directory: &Path, max_bytes: u64) -> Self {
        Self { directory: directory.into(), max_bytes, bytes: Mutex::new(None) }
    }

    /// Marks a file as used, because the least recently used files are removed first.
    pub(super) fn touch(path: &Path) {
        // A failure only means that the file is removed earlier.
        let _ = File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
    }

    /// Counts `bytes` that were added. Above the limit, removes the least recently used files until at most nine tenths
    /// of the limit remain.
    pub(super) fn add(&self, bytes: u64) {
        let mut known = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let total = match *known {
            Some(known) => known + bytes,
            // The directory already has the added file.
            None => cached_files(&self.directory).iter().map(|file| file.bytes).sum(),
        };
        *known = Some(if total > self.max_bytes { self.shrink() } else { total });
    }

    /// Removes files if the directory exceeds the limit. Returns the remaining bytes.
    fn shrink(&self) -> u64 {
        let mut files = cached_files(&self.directory);
        files.sort_by_key(|file| file.used);
        let mut left: u64 = files.iter().map(|file| file.bytes).sum();
        // Another process may have removed files meanwhile.
        if left <= self.max_bytes {
            return left;
        }
        for file in files {
            if left <= self.max_bytes / 10 * 9 {
                break;
            }
            // Fails if another process has removed the file already. A mapped file stays readable.
            let _ = fs::remove_file(&file.path);
            left -= file.bytes;
        }
        left
    }
}

/// The cached files, two folders deep. Unfinished ones of a killed process are removed.
fn cached_files(directory: &Path) -> Vec<CachedFile> {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = entries(directory).flat_map(|kind| entries(&kind).collect::<Vec<_>>());
    folders
        .flat_map(|folder| entries(&folder).collect::<Vec<_>>())
        .filter_map(|path| {
            let metadata = fs::symlink_metadata(&path).ok().filter(|metadata| metadata.is_file())?;
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension()?.to_str()? {
                "safetensors" => Some(CachedFile { path, bytes: metadata.len(), used }),
                "tmp" if used.elapsed().is_ok_and(|age| age > MAX_WRITING_AGE) => {
                    let _ = fs::remove_file(path);
                    None
                }
                _ => None,
            }
        })
        .collect()
}
