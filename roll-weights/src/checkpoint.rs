//! One network's weights, in one file or several shards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use roll_core::{StateDict, Tensor, files};
use serde::Deserialize;

use crate::error::WeightsError;
use crate::file::WeightFile;
use crate::info::TensorInfo;

/// The weights of one network: names, shapes and dtypes without loading, tensors on demand. Cloning is cheap.
#[derive(Clone)]
pub struct Checkpoint {
    files: Vec<Arc<WeightFile>>,
    /// From the name in use to the file and the name in it; they differ after [`Checkpoint::rename`].
    index: BTreeMap<String, (usize, String)>,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a weight file, or an index of shards (`*.safetensors.index.json`).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        match path.to_string_lossy().ends_with(".index.json") {
            true => Self::open_index(path),
            false => Self::open_shards(&[path]),
        }
    }

    /// Opens several files as one checkpoint. Fails when a name stands in two of them, or when their names say
    /// `00001-of-00003` and one of the series is not among them.
    pub fn open_shards<P: AsRef<Path>>(paths: &[P]) -> Result<Self, WeightsError> {
        let paths: Vec<&Path> = paths.iter().map(AsRef::as_ref).collect();
        if paths.is_empty() {
            return Err(WeightsError::NoMatch { pattern: "(an empty list of shards)".into() });
        }
        whole_series(&paths)?;
        let mut index = BTreeMap::new();
        let mut files: Vec<Arc<WeightFile>> = Vec::with_capacity(paths.len());
        for path in paths {
            let file = WeightFile::open(path)?;
            for key in file.keys() {
                if let Some((first, _)) = index.insert(key.to_string(), (files.len(), key.to_string())) {
                    let first = files.get(first).map_or(path, |f| f.path());
                    return Err(WeightsError::Duplicate {
                        tensor: key.into(),
                        first: first.into(),
                        second: path.into(),
                    });
                }
            }
            files.push(Arc::new(file));
        }
        Ok(Self { files, index })
    }

    /// Opens every weight file that matches a glob, in the order of their names. An index of shards that matches too
    /// is left aside.
    pub fn open_glob(pattern: &str) -> Result<Self, WeightsError> {
        Self::open_shards(&crate::expand_glob(pattern)?)
    }

    /// Opens whatever a person would name: a file, an index, a glob, or a directory with one network's files.
    pub fn open_any(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        let text = path.to_string_lossy();
        if path.is_dir() {
            return Self::open_directory(path);
        }
        match !path.exists() && text.contains(['*', '?', '[']) {
            true => Self::open_glob(&text),
            false => Self::open(path),
        }
    }

    fn open_directory(path: &Path) -> Result<Self, WeightsError> {
        let entries = std::fs::read_dir(path).map_err(WeightsError::io("read", path))?;
        let mut found: Vec<PathBuf> = Vec::new();
        for entry in entries {
            found.push(entry.map_err(WeightsError::io("read", path))?.path());
        }
        found.sort();
        let ends = |p: &PathBuf, end: &str| p.to_string_lossy().to_lowercase().ends_with(end);
        let indexes: Vec<&PathBuf> = found.iter().filter(|p| ends(p, ".safetensors.index.json")).collect();
        match indexes.as_slice() {
            [index] => return Self::open_index(index),
            [] => {}
            several => {
                let hint = format!("; it has {} indexes of shards, name one of them", several.len());
                return Err(WeightsError::Directory { path: path.into(), hint });
            }
        }
        let files: Vec<PathBuf> = found.into_iter().filter(|p| p.is_file() && ends(p, ".safetensors")).collect();
        match files.is_empty() {
            true => Err(WeightsError::NoMatch { pattern: path.join("*.safetensors").display().to_string() }),
            false => Self::open_shards(&files),
        }
    }

    fn open_index(path: &Path) -> Result<Self, WeightsError> {
        if path.is_dir() {
            return Err(WeightsError::Directory { path: path.into(), hint: String::new() });
        }
        let bytes = files::read(path, files::MAX_TEXT).map_err(WeightsError::io("read", path))?;
        let shards: ShardIndex = serde_json::from_slice(&bytes).map_err(|e| WeightsError::Header {
            path: path.into(),
            problem: format!("expected an index of shards with a `weight_map`: {e}"),
        })?;
        let directory = path.parent().unwrap_or(Path::new("."));
        let mut names: Vec<&String> = shards.weight_map.values().collect();
        names.sort();
        names.dedup();
        let mut files: Vec<Arc<WeightFile>> = Vec::with_capacity(names.len());
        for name in &names {
            // A shard stands beside its index; anything else would let an index read any file of the machine.
            if Path::new(name).file_name() != Some(std::ffi::OsStr::new(name)) {
                return Err(WeightsError::Header {
                    path: path.into(),
                    problem: format!("expected shards beside the index, found the path `{name}`"),
                });
            }
            let shard = directory.join(name);
            if !shard.exists() {
                return Err(WeightsError::MissingShard { of: path.into(), shard: name.to_string() });
            }
            files.push(Arc::new(WeightFile::open(shard)?));
        }
        let mut index = BTreeMap::new();
        for (key, name) in &shards.weight_map {
            let number = names.binary_search(&name).unwrap_or_default(); // there: `names` was made from it
            if files[number].info(key).is_none() {
                return Err(WeightsError::MissingTensor { path: files[number].path().into(), tensor: key.clone() });
            }
            index.insert(key.clone(), (number, key.clone()));
        }
        Ok(Self { files, index })
    }

    /// Names of the tensors, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether it holds no tensor.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Whether it holds the tensor `key`.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// Shape and dtype of a tensor.
    pub fn info(&self, key: &str) -> Option<&TensorInfo> {
        let (file, stored) = self.index.get(key)?;
        self.files[*file].info(stored)
    }

    /// The shapes of all tensors.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        self.keys().filter_map(|k| Some((k.to_string(), self.info(k)?.shape.clone()))).collect()
    }

    /// Reads one tensor. One in eight bits comes in f32, times its scale; [`Checkpoint::scaled`] leaves it as it is.
    pub fn tensor(&self, key: &str) -> Result<Tensor, WeightsError> {
        if let Some(tensor) = self.widened(key)? {
            return Ok(tensor);
        }
        let missing = || WeightsError::MissingTensor { path: self.path().into(), tensor: key.into() };
        let (file, stored) = self.index.get(key).ok_or_else(missing)?;
        self.files[*file].tensor(stored)
    }

    /// Gives back the memory of a mapped tensor, which stays readable: it is for those who have copied it.
    pub fn release(&self, key: &str) {
        if let Some((file, stored)) = self.index.get(key) {
            self.files[*file].release(stored);
        }
    }

    /// As [`WeightFile::stored_bytes`].
    pub fn stored_bytes(&self, key: &str) -> Option<usize> {
        let (file, stored) = self.index.get(key)?;
        self.files[*file].stored_bytes(stored)
    }

    /// As [`WeightFile::read_part`].
    pub fn read_part(&self, key: &str, at: usize, buffer: &mut [u8]) -> Result<(), WeightsError> {
        let missing = || WeightsError::MissingTensor { path: self.path().into(), tensor: key.into() };
        let (file, stored) = self.index.get(key).ok_or_else(missing)?;
        self.files[*file].read_part(stored, at, buffer)
    }

    /// The file of a tensor, and its name there.
    pub(crate) fn place(&self, key: &str) -> Option<(&WeightFile, &str)> {
        let (file, stored) = self.index.get(key)?;
        Some((self.files.get(*file)?, stored))
    }

    /// Its files.
    pub(crate) fn files(&self) -> impl Iterator<Item = &WeightFile> {
        self.files.iter().map(|file| &**file)
    }

    /// Its files, each with the names of the tensors in it.
    pub fn shards(&self) -> Vec<(&WeightFile, Vec<&str>)> {
        let mut shards: Vec<(&WeightFile, Vec<&str>)> = self.files.iter().map(|f| (&**f, Vec::new())).collect();
        for (key, (file, _)) in &self.index {
            shards[*file].1.push(key);
        }
        shards
    }

    /// The tensors whose name `wanted` accepts. Mapped files are paged in as they are used; torch checkpoints are
    /// read here.
    pub fn state(&self, wanted: impl Fn(&str) -> bool) -> Result<StateDict, WeightsError> {
        self.keys().filter(|k| wanted(k)).map(|k| Ok((k.to_string(), self.tensor(k)?))).collect()
    }

    /// All tensors.
    pub fn all(&self) -> Result<StateDict, WeightsError> {
        self.state(|_| true)
    }

    /// The first file, which messages name.
    pub fn path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), |f| f.path())
    }

    /// All files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|f| f.path())
    }

    /// The metadata of all files; of a key that stands in several, the last.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.files.iter().flat_map(|f| f.metadata()).collect()
    }

    /// The `config.json` beside the first file. `None` when there is none or it is no JSON object.
    pub fn config_json(&self) -> Option<serde_json::Map<String, serde_json::Value>> {
        let bytes = files::read(&self.path().parent()?.join("config.json"), files::MAX_TEXT).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// The same tensors under other names; those for which `name` gives `None` are left out. Fails when two tensors
    /// would get one name.
    pub fn rename(self, name: impl Fn(&str) -> Option<String>) -> Result<Self, WeightsError> {
        let mut index: BTreeMap<String, (usize, String)> = BTreeMap::new();
        for (key, (file, stored)) in self.index {
            let Some(new) = name(&key) else { continue };
            if let Some((first, _)) = index.insert(new.clone(), (file, stored)) {
                let path = |i: usize| -> PathBuf { self.files[i].path().into() };
                return Err(WeightsError::Duplicate { tensor: new, first: path(first), second: path(file) });
            }
        }
        Ok(Self { files: self.files, index })
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({}, {} files, {} tensors)", self.path().display(), self.files.len(), self.len())
    }
}

/// Checks that shards called `name-00002-of-00007.ext` are all there.
fn whole_series(paths: &[&Path]) -> Result<(), WeightsError> {
    for path in paths {
        let Some((stem, count, tail)) = series(path) else { continue };
        // A lying count must not make us loop for ever: the first gap ends it.
        for number in 1..=count {
            let name = format!("{stem}{number:05}-of-{count:05}{tail}");
            if !paths.iter().any(|p| p.file_name().is_some_and(|f| f.to_string_lossy() == name)) {
                return Err(WeightsError::MissingShard { of: path.to_path_buf(), shard: name });
            }
        }
    }
    Ok(())
}

/// `a-00002-of-00007.safetensors` as (`a-`, 7, `.safetensors`).
fn series(path: &Path) -> Option<(String, u32, String)> {
    let name = path.file_name()?.to_str()?;
    let middle = name.find("-of-")?;
    let number = |s: &str| (s.len() == 5).then(|| s.parse::<u32>().ok()).flatten();
    let (before, after) = (name.get(..middle)?, name.get(middle + 4..)?);
    let stem = before.get(..before.len().checked_sub(5)?)?;
    number(before.get(stem.len()..)?)?;
    let count = number(after.get(..5)?)?;
    Some((stem.into(), count, after.get(5..)?.into()))
}
