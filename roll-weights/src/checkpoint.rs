//! The weights of one network, in one file or several shards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use roll_core::{DType, StateDict, Tensor};
use roll_external::files;
use serde::Deserialize;

use crate::error::WeightsError;
use crate::file::WeightFile;
use crate::tensor_info::TensorInfo;

/// The weights of one network: names, shapes and dtypes are known, tensors are read on demand. A clone shares the open
/// files.
#[derive(Clone)]
pub struct Checkpoint {
    files: Vec<Arc<WeightFile>>,
    /// The place of each tensor, by the name in use.
    index: BTreeMap<String, StoredTensor>,
    /// The change of [`Checkpoint::with_change`].
    change: Option<Arc<dyn ChangeOnRead>>,
}

/// The place of a tensor.
#[derive(Clone)]
struct StoredTensor {
    /// Position of its file in [`Checkpoint::files`].
    file: usize,
    /// Its name in that file, which differs from the name in use after [`Checkpoint::rename`].
    name_in_file: String,
}

/// A change of the values of tensors whenever they are read, such as an adapter that is merged into the weights.
pub trait ChangeOnRead: Send + Sync {
    /// Whether the tensor is changed. Only tensors that their file has in f32, bf16 or f16 may be changed.
    fn touches(&self, key: &str) -> bool;

    /// Changes the values of a tensor, row-major. They are rounded to the file's dtype once, afterwards.
    fn apply(&self, key: &str, values: &mut [f32]) -> Result<(), WeightsError>;
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a weight file or an index of shards (`*.safetensors.index.json`).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        if path.to_string_lossy().ends_with(".index.json") {
            Self::open_index(path)
        } else {
            Self::open_shards(&[path])
        }
    }

    /// Opens several files as one checkpoint. Fails if two files have a tensor of the same name, or if the file names
    /// say `00001-of-00003` and one file of the series is missing.
    pub fn open_shards<P: AsRef<Path>>(paths: &[P]) -> Result<Self, WeightsError> {
        let paths: Vec<&Path> = paths.iter().map(AsRef::as_ref).collect();
        if paths.is_empty() {
            return Err(WeightsError::NoMatch { pattern: "(an empty list of shards)".into() });
        }
        check_series(&paths)?;
        let mut index = BTreeMap::new();
        let mut files: Vec<Arc<WeightFile>> = Vec::with_capacity(paths.len());
        for path in paths {
            let file = WeightFile::open(path)?;
            for key in file.keys() {
                let stored = StoredTensor { file: files.len(), name_in_file: key.to_string() };
                if let Some(earlier) = index.insert(key.to_string(), stored) {
                    let earlier_path = files.get(earlier.file).map_or(path, |file| file.path());
                    return Err(WeightsError::duplicate(key, earlier_path, path));
                }
            }
            files.push(Arc::new(file));
        }
        Ok(Self { files, index, change: None })
    }

    /// Opens every weight file that matches a glob, in the order of their names. An index of shards that matches is
    /// ignored.
    pub fn open_glob(pattern: &str) -> Result<Self, WeightsError> {
        Self::open_shards(&crate::expand_glob(pattern)?)
    }

    /// Opens any kind of path: a file, an index, a glob, or a directory with the files of one network.
    pub fn open_any(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        let text = path.to_string_lossy();
        if path.is_dir() {
            return Self::open_directory(path);
        }
        let is_glob = !path.exists() && text.contains(['*', '?', '[']);
        if is_glob { Self::open_glob(&text) } else { Self::open(path) }
    }

    /// Opens the one index of shards in a directory; without an index, all its safetensors files.
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
        if files.is_empty() {
            return Err(WeightsError::NoMatch { pattern: path.join("*.safetensors").display().to_string() });
        }
        Self::open_shards(&files)
    }

    fn open_index(path: &Path) -> Result<Self, WeightsError> {
        // A directory may have the name of an index.
        if path.is_dir() {
            return Err(WeightsError::Directory { path: path.into(), hint: String::new() });
        }
        let bytes = files::read_filled(path, files::MAX_TEXT).map_err(WeightsError::io("read", path))?;
        let shards: ShardIndex = serde_json::from_slice(&bytes).map_err(|e| {
            WeightsError::invalid(path, format!("expected an index of shards with a `weight_map`: {e}"))
        })?;
        let directory = path.parent().unwrap_or(Path::new("."));
        let mut names: Vec<&String> = shards.weight_map.values().collect();
        names.sort();
        names.dedup();
        let mut files: Vec<Arc<WeightFile>> = Vec::with_capacity(names.len());
        for name in &names {
            // A shard lies next to its index. Any other path would let an index read any file of the machine.
            if Path::new(name).file_name() != Some(std::ffi::OsStr::new(name)) {
                let problem = format!("expected shards beside the index, found the path `{name}`");
                return Err(WeightsError::invalid(path, problem));
            }
            let shard = directory.join(name);
            if !shard.exists() {
                return Err(WeightsError::missing_shard(path, name));
            }
            files.push(Arc::new(WeightFile::open(shard)?));
        }
        let mut index = BTreeMap::new();
        for (key, name) in &shards.weight_map {
            let number = names.binary_search(&name).unwrap_or_default(); // found: `names` was made from these values
            if files[number].info(key).is_none() {
                return Err(WeightsError::missing(files[number].path(), key));
            }
            index.insert(key.clone(), StoredTensor { file: number, name_in_file: key.clone() });
        }
        Ok(Self { files, index, change: None })
    }

    /// Names of the tensors, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.index.keys().map(String::as_str)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether the checkpoint holds no tensor.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Whether the checkpoint holds the tensor `key`.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// Shape and dtype of a tensor.
    pub fn info(&self, key: &str) -> Option<&TensorInfo> {
        let (file, name_in_file) = self.locate(key)?;
        file.info(name_in_file)
    }

    /// The shapes of all tensors.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        self.keys().filter_map(|k| Some((k.to_string(), self.info(k)?.shape.clone()))).collect()
    }

    /// Returns the same tensors with `change`. [`Checkpoint::tensor`], [`Checkpoint::state`] and [`Checkpoint::all`] of
    /// the result return changed values.
    pub fn with_change(self, change: Arc<dyn ChangeOnRead>) -> Self {
        Self { change: Some(change), ..self }
    }

    /// Reads one tensor. An eight-bit weight is converted to f32 and multiplied by its scale; [`Checkpoint::scaled`]
    /// returns it quantised. Fails for the packed codes of a quantisation that is not supported; see
    /// [`Checkpoint::refuse_packed`].
    pub fn tensor(&self, key: &str) -> Result<Tensor, WeightsError> {
        if let Some(tensor) = self.dequantised(key)? {
            return Ok(tensor);
        }
        let (file, name_in_file) = self.locate(key).ok_or_else(|| self.missing(key))?;
        self.refuse_packed(key)?;
        let tensor = file.tensor(name_in_file)?;
        let Some(change) = self.change.as_ref().filter(|change| change.touches(key)) else { return Ok(tensor) };
        let mut values = tensor.to_f32_vec();
        change.apply(key, &mut values)?;
        let changed = Tensor::new(values, tensor.shape()).and_then(|changed| changed.to_float(tensor.dtype()));
        changed.map_err(|e| WeightsError::tensor(file.path(), name_in_file, e))
    }

    /// Fails if the tensor `key` is a weight (its name in the file ends with `.weight`) and a matrix of u8: the packed
    /// codes of a quantisation that is not supported.
    pub fn refuse_packed(&self, key: &str) -> Result<(), WeightsError> {
        let Some((file, name_in_file)) = self.locate(key) else { return Ok(()) };
        let is_u8_matrix = |info: &TensorInfo| info.dtype == Some(DType::U8) && info.shape.len() > 1;
        if name_in_file.ends_with(".weight") && file.info(name_in_file).is_some_and(is_u8_matrix) {
            let problem = "expected a matrix of f32, bf16, f16, fp8 or int8 with scales, found u8: the packed codes of \
                           another quantisation (nvfp4, nf4, GPTQ), which is not read; take the file in bf16 or fp8";
            return Err(WeightsError::tensor(file.path(), name_in_file, problem));
        }
        Ok(())
    }

    /// Releases the memory of a mapped tensor, for callers that have copied it. The tensor stays readable.
    pub fn release(&self, key: &str) {
        if let Some((file, name_in_file)) = self.locate(key) {
            file.release(name_in_file);
        }
    }

    /// Bytes of the tensor `key` in its file; see [`WeightFile::stored_bytes`].
    pub fn stored_bytes(&self, key: &str) -> Option<usize> {
        let (file, name_in_file) = self.locate(key)?;
        file.stored_bytes(name_in_file)
    }

    /// Reads bytes of the tensor `key` from byte `at` on; see [`WeightFile::read_part`].
    pub fn read_part(&self, key: &str, at: usize, buffer: &mut [u8]) -> Result<(), WeightsError> {
        let (file, name_in_file) = self.locate(key).ok_or_else(|| self.missing(key))?;
        file.read_part(name_in_file, at, buffer)
    }

    pub(crate) fn missing(&self, key: &str) -> WeightsError {
        WeightsError::missing(self.path(), key)
    }

    /// Returns the file of a tensor, and the name of the tensor in that file.
    pub(crate) fn locate(&self, key: &str) -> Option<(&WeightFile, &str)> {
        let StoredTensor { file, name_in_file } = self.index.get(key)?;
        Some((self.files.get(*file)?, name_in_file))
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &WeightFile> {
        self.files.iter().map(|file| &**file)
    }

    /// The files, each with the names of its tensors.
    pub fn shards(&self) -> Vec<(&WeightFile, Vec<&str>)> {
        let mut keys_of_files: Vec<Vec<&str>> = vec![Vec::new(); self.files.len()];
        for (key, stored) in &self.index {
            keys_of_files[stored.file].push(key);
        }
        self.files().zip(keys_of_files).collect()
    }

    /// Reads the tensors whose names `wanted` accepts. Tensors of mapped files are paged in at their first use; tensors
    /// of torch checkpoints are read here.
    pub fn state(&self, wanted: impl Fn(&str) -> bool) -> Result<StateDict, WeightsError> {
        self.keys().filter(|k| wanted(k)).map(|k| Ok((k.to_string(), self.tensor(k)?))).collect()
    }

    /// Reads all tensors.
    pub fn all(&self) -> Result<StateDict, WeightsError> {
        self.state(|_| true)
    }

    /// The first file, which error messages name.
    pub fn path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), |f| f.path())
    }

    /// All files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|f| f.path())
    }

    /// The metadata of all files. The last file's value wins if several files have the key.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.files.iter().flat_map(|f| f.metadata().clone()).collect()
    }

    /// The `config.json` next to the first file; `None` if it is missing or not a JSON object.
    pub fn config_json(&self) -> Option<serde_json::Map<String, serde_json::Value>> {
        let bytes = files::read_text_bytes(&self.path().parent()?.join("config.json"), files::MAX_TEXT).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Returns the same tensors under the names that `new_name` returns for their present names. A tensor for which it
    /// returns `None` is left out. Fails if two tensors would have the same name. A change of
    /// [`Checkpoint::with_change`] is dropped, because it knows tensors by their old names.
    pub fn rename(self, new_name: impl Fn(&str) -> Option<String>) -> Result<Self, WeightsError> {
        let mut index: BTreeMap<String, StoredTensor> = BTreeMap::new();
        for (key, stored) in self.index {
            let Some(renamed) = new_name(&key) else { continue };
            let path = self.files[stored.file].path();
            if let Some(earlier) = index.insert(renamed.clone(), stored) {
                return Err(WeightsError::duplicate(&renamed, self.files[earlier.file].path(), path));
            }
        }
        Ok(Self { files: self.files, index, change: None })
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({}, {} files, {} tensors)", self.path().display(), self.files.len(), self.len())
    }
}

/// Fails if one of the shards called `name-00002-of-00007.ext` is missing.
fn check_series(paths: &[&Path]) -> Result<(), WeightsError> {
    for path in paths {
        let Some((stem, count, tail)) = split_shard_name(path) else { continue };
        // A huge count in a name does no harm, because the loop ends at the first missing file.
        for number in 1..=count {
            let name = format!("{stem}{number:05}-of-{count:05}{tail}");
            if !paths.iter().any(|p| p.file_name().is_some_and(|f| f.to_string_lossy() == name)) {
                return Err(WeightsError::missing_shard(path, &name));
            }
        }
    }
    Ok(())
}

/// Splits `a-00002-of-00007.safetensors` into (`a-`, 7, `.safetensors`). `None` for other names.
fn split_shard_name(path: &Path) -> Option<(String, u32, String)> {
    /// Number of digits of a shard's number and of the count.
    const DIGITS: usize = 5;
    let (before, after) = path.file_name()?.to_str()?.split_once("-of-")?;
    let (stem, number) = before.split_at_checked(before.len().checked_sub(DIGITS)?)?;
    let (count, tail) = after.split_at_checked(DIGITS)?;
    let _number: u32 = number.parse().ok()?;
    Some((stem.into(), count.parse().ok()?, tail.into()))
}
