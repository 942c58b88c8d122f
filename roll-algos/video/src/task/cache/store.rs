//! Tensors in files whose names are fingerprints of the inputs they were computed from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use roll_core::{Error, Result, StateDict};
use roll_external::Fingerprint;
use roll_weights::{Checkpoint, save_safetensors};

use super::limit::Limit;

/// Name, in the metadata of a file, of the hash of the entry's key and values when they were written.
const CHECKSUM: &str = "sha256";

/// A directory of cached tensors. Any number of processes may use it at once: a file appears whole, by a rename, and
/// processes that compute the same entry write the same bytes. The directory may be emptied at any time.
#[derive(Clone, Debug)]
pub struct CacheStore {
    directory: PathBuf,
    limit: Arc<Limit>,
    counts: Arc<Counts>,
}

/// Numbers of entries.
#[derive(Debug, Default)]
struct Counts {
    found: AtomicU64,
    computed: AtomicU64,
    /// Entries that were computed and could not be written.
    unwritten: AtomicU64,
}

impl CacheStore {
    /// Opens the directory for files of at most `limit` bytes together, and creates it if it does not exist. Fails if
    /// it cannot be created.
    pub fn open(directory: &Path, limit: u64) -> Result<Self> {
        std::fs::create_dir_all(directory).map_err(Error::file("create the directory", directory))?;
        let limit = Arc::new(Limit::new(directory, limit));
        Ok(Self { directory: directory.into(), limit, counts: Arc::default() })
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The entry of `key` in the folder `kind`. An entry that is missing or damaged is computed and stored. A failure
    /// to store an entry is only a warning, which is logged once.
    pub fn get(&self, kind: &str, key: &str, compute: impl FnOnce() -> Result<StateDict>) -> Result<StateDict> {
        let folder = self.directory.join(kind).join(&key[..2]); // keys are hexadecimal
        let path = folder.join(format!("{key}.safetensors"));
        if path.exists() {
            match read(&path, key) {
                Ok(state) => {
                    Limit::touch(&path);
                    self.counts.found.fetch_add(1, Ordering::Relaxed);
                    return Ok(state);
                }
                // The file was removed meanwhile, to make room for others.
                Err(_) if !path.exists() => {}
                Err(error) => tracing::warn!("computed again, and replaced: {}", error.chain()),
            }
        }
        let state = compute()?;
        self.counts.computed.fetch_add(1, Ordering::Relaxed);
        match write(&folder, &path, key, &state) {
            Ok(bytes) => self.limit.add(bytes),
            Err(error) => {
                let is_first = self.counts.unwritten.fetch_add(1, Ordering::Relaxed) == 0;
                if is_first {
                    tracing::warn!("encodings are not kept: {}", error.chain());
                }
            }
        }
        Ok(state)
    }

    /// The number of entries that were found, and the number of entries that were computed.
    pub fn counts(&self) -> [u64; 2] {
        [&self.counts.found, &self.counts.computed].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Reads the entry of `key`. Fails unless its values are those that were written.
fn read(path: &Path, key: &str) -> Result<StateDict> {
    let file = Checkpoint::open(path)?;
    let state = file.all()?;
    match file.metadata().get(CHECKSUM) {
        Some(sum) if *sum == checksum(key, &state) => Ok(state),
        _ => Err(Error::bad_file(path, "its values have changed since they were written, or belong to another name")),
    }
}

/// Writes the file, first under a random name. A name with the process id would not do, because processes on several
/// machines may have the same id. Returns the size of the file.
fn write(folder: &Path, path: &Path, key: &str, state: &StateDict) -> Result<u64> {
    std::fs::create_dir_all(folder).map_err(Error::file("create the directory", folder))?;
    let temporary = folder.join(format!(".{:016x}.tmp", rand::random::<u64>()));
    let metadata = BTreeMap::from([(CHECKSUM.to_string(), checksum(key, state))]);
    let written = save_safetensors(&temporary, state, &metadata).map_err(Error::from);
    let placed = written.and_then(|()| std::fs::rename(&temporary, path).map_err(Error::file("write", path)));
    placed.inspect_err(|_| drop(std::fs::remove_file(&temporary)))?;
    Ok(std::fs::metadata(path).map_or(0, |metadata| metadata.len()))
}

/// The hash of an entry's key and values.
fn checksum(key: &str, state: &StateDict) -> String {
    let sum = Fingerprint::new("tensors").text("key", key);
    state.iter().fold(sum, |sum, (name, tensor)| sum.tensor(name, tensor)).finish()
}

#[cfg(test)]
mod tests {
    use roll_core::Tensor;

    use super::*;

    fn state(value: f32) -> StateDict {
        [("a".to_string(), Tensor::full([2, 3], value)), ("b".to_string(), Tensor::new(vec![7i64], [1]).unwrap())]
            .into()
    }

    fn bytes(state: &StateDict) -> Vec<Vec<u8>> {
        state.values().map(|t| t.as_bytes().to_vec()).collect()
    }

    fn files(directory: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(directory).unwrap().flatten().map(|e| e.path());
        entries.flat_map(|p| if p.is_dir() { files(&p) } else { vec![p] }).collect()
    }

    #[test]
    fn damaged_entries_are_computed_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = CacheStore::open(dir.path(), u64::MAX).unwrap();
        let key = Fingerprint::new("x").finish();
        let first = store.get("targets", &key, || Ok(state(1.0))).unwrap();
        let found = store.get("targets", &key, || panic!("it is kept")).unwrap();
        assert_eq!(bytes(&found), bytes(&first));
        let file = files(dir.path()).remove(0);
        for spoil in [|b: &mut Vec<u8>| b.truncate(b.len() - 1), |b: &mut Vec<u8>| *b.last_mut().unwrap() ^= 1] {
            let mut bytes = std::fs::read(&file).unwrap();
            spoil(&mut bytes);
            std::fs::remove_file(&file).unwrap(); // it may be mapped
            std::fs::write(&file, bytes).unwrap();
            let again = store.get("targets", &key, || Ok(state(1.0))).unwrap();
            assert_eq!(again["a"].to_f32_vec(), [1.0; 6]);
        }
        assert_eq!(store.counts(), [1, 3]);
        assert!(store.get("targets", &Fingerprint::new("y").finish(), || Err(Error::Misuse("no".into()))).is_err());
        assert_eq!(files(dir.path()), [file]);
    }

    #[test]
    fn entries_under_the_name_of_another_are_computed_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = CacheStore::open(dir.path(), u64::MAX).unwrap();
        let keys = ["x", "y"].map(|name| Fingerprint::new(name).finish());
        let place = |key: &String| dir.path().join("targets").join(&key[..2]).join(format!("{key}.safetensors"));
        for (key, value) in keys.iter().zip([1.0, 2.0]) {
            store.get("targets", key, || Ok(state(value))).unwrap();
        }
        std::fs::rename(place(&keys[0]), place(&keys[1])).unwrap();
        let found = store.get("targets", &keys[1], || Ok(state(2.0))).unwrap();
        assert_eq!(found["a"].to_f32_vec(), [2.0; 6]);
    }

    #[test]
    fn threads_may_write_the_same_entry_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let store = CacheStore::open(dir.path(), u64::MAX).unwrap();
        let keys: Vec<String> = (0..20).map(|i| Fingerprint::new("k").text("i", i).finish()).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for (i, key) in keys.iter().enumerate() {
                        let got = store.get("encodings", key, || Ok(state(i as f32))).unwrap();
                        assert_eq!(got["a"].to_f32_vec(), [i as f32; 6]);
                    }
                });
            }
        });
        assert_eq!(files(dir.path()).len(), 20);
        assert!(files(dir.path()).iter().all(|f| f.extension().is_some_and(|e| e == "safetensors")));
    }

    #[test]
    fn the_least_recently_used_files_are_removed_beyond_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let keys: Vec<String> = (0..12).map(|i| Fingerprint::new("k").text("i", i).finish()).collect();
        let get = |store: &CacheStore, i: usize| {
            // Times of files may be no finer than hundredths of a second.
            std::thread::sleep(std::time::Duration::from_millis(20));
            store.get("targets", &keys[i], || Ok(state(i as f32))).unwrap()["a"].to_f32_vec()[0]
        };
        let store = CacheStore::open(dir.path(), u64::MAX).unwrap();
        get(&store, 0);
        let size = std::fs::metadata(&files(dir.path())[0]).unwrap().len();
        let store = CacheStore::open(dir.path(), 10 * size).unwrap();
        for i in 1..10 {
            get(&store, i);
        }
        assert_eq!(files(dir.path()).len(), 10);
        // The first is used again, the second is the oldest now.
        assert_eq!(get(&store, 0), 0.0);
        get(&store, 10);
        let place = |key: &String| dir.path().join("targets").join(&key[..2]).join(format!("{key}.safetensors"));
        let left: Vec<bool> = keys[..11].iter().map(|key| place(key).exists()).collect();
        assert_eq!(left, [true, false, false, true, true, true, true, true, true, true, true]);
        // Another process, which looks for itself.
        let other = CacheStore::open(dir.path(), 3 * size).unwrap();
        get(&other, 11);
        assert_eq!(files(dir.path()).len(), 2);
    }
}
