//! Copies weights from file to file with other shards, another dtype or changed values. Memory holds a few megabytes at
//! a time, however large the tensors are.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use roll_core::{DType, Tensor};
use serde_json::json;

use crate::checkpoint::Checkpoint;
use crate::error::WeightsError;
use crate::safetensors::dtype_name;
use crate::writer::{SafetensorsWriter, TensorEntry};

/// Number of elements that are converted at a time, in whole rows. A longer row is converted whole.
const CHUNK_ELEMENTS: usize = 1 << 20;
/// Number of bytes that are copied unchanged at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// A change of tensor values during the copy.
pub trait Change<E> {
    /// Whether the values of the tensor are changed.
    fn touches(&self, key: &str) -> bool;

    /// Changes some rows of a tensor, which is seen as a matrix `[shape[0], product of the other axes]`. `values` are
    /// the elements of these rows in f32, row-major. They are rounded to the output's dtype once, afterwards.
    fn apply(&mut self, key: &str, rows: Range<usize>, values: &mut [f32]) -> Result<(), E>;
}

impl<E> Change<E> for () {
    fn touches(&self, _: &str) -> bool {
        false
    }
    fn apply(&mut self, _: &str, _: Range<usize>, _: &mut [f32]) -> Result<(), E> {
        Ok(())
    }
}

/// The plan of a copy: the files to write and the tensors in each.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// The directory, if there are several files. It appears whole or not at all.
    directory: Option<PathBuf>,
    /// The path of each file (relative to the directory, if there is one), and the names of its tensors.
    files: Vec<(PathBuf, Vec<String>)>,
    /// Name of the index of shards in the directory; `None` writes no index.
    index: Option<String>,
}

impl Outputs {
    /// Puts all tensors into one file.
    pub fn one_file(source: &Checkpoint, path: &Path) -> Self {
        Self { directory: None, files: vec![(path.into(), source.keys().map(String::from).collect())], index: None }
    }

    /// Keeps the source's shards: same names, same contents, in `directory`.
    pub fn like(source: &Checkpoint, directory: &Path) -> Self {
        let files = source.shards().into_iter().map(|(file, keys)| {
            let name = file.path().file_name().unwrap_or_default();
            (PathBuf::from(name).with_extension("safetensors"), keys.into_iter().map(String::from).collect())
        });
        let files: Vec<_> = files.collect();
        let index = (files.len() > 1).then(|| format!("{}.index.json", series_name(source)));
        Self { directory: Some(directory.into()), files, index }
    }

    /// Splits the tensors, in the order of their keys, into shards of at most `max_bytes` bytes in `directory`. A
    /// larger tensor has a shard of its own.
    pub fn split(
        source: &Checkpoint,
        directory: &Path,
        max_bytes: u64,
        dtype: Option<DType>,
    ) -> Result<Self, WeightsError> {
        // Bytes and keys of each shard.
        let mut shards: Vec<(u64, Vec<String>)> = Vec::new();
        for key in source.keys() {
            let bytes = entry(source, key, dtype)?.bytes;
            match shards.last_mut() {
                Some((size, keys)) if size.saturating_add(bytes) <= max_bytes => {
                    *size += bytes;
                    keys.push(key.into());
                }
                _ => shards.push((bytes, vec![key.into()])),
            }
        }
        let (name, count) = (series_name(source), shards.len());
        let stem = name.strip_suffix(".safetensors").unwrap_or(&name);
        let file_of_shard = |(i, (_, keys)): (usize, (u64, Vec<String>))| {
            let file = format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1);
            (PathBuf::from(file), keys)
        };
        let files = shards.into_iter().enumerate().map(file_of_shard).collect();
        Ok(Self { directory: Some(directory.into()), files, index: Some(format!("{name}.index.json")) })
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there is no file to write.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
}

/// Copies `source` to `outputs`.
///
/// Float tensors become `dtype`, if one is given. Values that `change` does not touch and whose dtype stays the same
/// are copied bit for bit. `metadata` is written to every file. A `config.json` next to the source is copied into the
/// output directory. `progress` receives the number of source bytes of each piece.
///
/// Fails before anything is written if an output path is one of the source's files or if the directory is not empty.
/// Returns the paths of the written files.
pub fn rewrite<E: From<WeightsError>>(
    source: &Checkpoint,
    outputs: &Outputs,
    dtype: Option<DType>,
    change: &mut dyn Change<E>,
    metadata: &BTreeMap<String, String>,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<PathBuf>, E> {
    let mut rewriter = Rewriter { source, dtype, change, metadata, progress };
    let Some(directory) = &outputs.directory else {
        for (path, keys) in &outputs.files {
            refuse_source(source, path)?;
            rewriter.write_file(path, keys)?;
        }
        return Ok(outputs.files.iter().map(|(path, _)| path.clone()).collect());
    };
    let directory = directory.as_path();
    if fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some()) || directory.is_file() {
        let found = "something there already".into();
        let expected = "a new or empty directory".into();
        return Err(WeightsError::Format { path: directory.into(), expected, found }.into());
    }
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    let temporary = directory.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let written = rewriter.write_directory(outputs, &temporary).and_then(|()| {
        // The target may be an empty directory, which is removed; a missing one cannot be removed.
        let _ = fs::remove_dir(directory);
        Ok(fs::rename(&temporary, directory).map_err(WeightsError::io("write", directory))?)
    });
    if let Err(e) = written {
        let _ = fs::remove_dir_all(&temporary);
        return Err(e);
    }
    Ok(outputs.files.iter().map(|(path, _)| directory.join(path)).collect())
}

/// The arguments of [`rewrite`].
struct Rewriter<'a, E> {
    source: &'a Checkpoint,
    dtype: Option<DType>,
    change: &'a mut dyn Change<E>,
    metadata: &'a BTreeMap<String, String>,
    progress: &'a mut dyn FnMut(u64),
}

impl<E: From<WeightsError>> Rewriter<'_, E> {
    fn write_directory(&mut self, outputs: &Outputs, directory: &Path) -> Result<(), E> {
        fs::create_dir_all(directory).map_err(WeightsError::io("create", directory))?;
        let mut weight_map = BTreeMap::new();
        let mut total = 0;
        for (name, keys) in &outputs.files {
            total += self.write_file(&directory.join(name), keys)?;
            weight_map.extend(keys.iter().map(|key| (key.as_str(), name.to_string_lossy())));
        }
        if let Some(index) = &outputs.index {
            let path = directory.join(index);
            let text = format!("{:#}\n", json!({ "metadata": { "total_size": total }, "weight_map": weight_map }));
            fs::write(&path, text).map_err(WeightsError::io("write", path))?;
        }
        let config = self.source.path().with_file_name("config.json");
        if config.is_file() {
            let path = directory.join("config.json");
            fs::copy(config, &path).map_err(WeightsError::io("write", path))?;
        }
        Ok(())
    }

    /// Writes one file and returns the number of its tensor bytes.
    fn write_file(&mut self, path: &Path, keys: &[String]) -> Result<u64, E> {
        let entries = keys.iter().map(|key| entry(self.source, key, self.dtype)).collect::<Result<Vec<_>, _>>()?;
        let total = entries.iter().map(|e| e.bytes).sum();
        let mut writer = SafetensorsWriter::create(path, entries, self.metadata)?;
        for TensorEntry { name, .. } in writer.order().to_vec() {
            self.copy(&name, &mut writer)?;
        }
        writer.finish()?;
        Ok(total)
    }

    /// Copies one tensor: byte for byte, or by rows if its values or its dtype change.
    fn copy(&mut self, key: &str, writer: &mut SafetensorsWriter) -> Result<(), E> {
        let source = self.source;
        let info = source.info(key).ok_or_else(|| source.missing(key))?;
        let input = TensorBytes::open(source, key)?;
        let is_changed = self.change.touches(key);
        let from = match info.dtype {
            Some(from) => from,
            // Values of a dtype that is not supported cannot be changed.
            None if is_changed => return Err(info.unsupported_dtype(source.path(), key).into()),
            None => return self.copy_bytes(&input, writer),
        };
        let to = output_dtype(from, self.dtype);
        if is_changed || to != from {
            self.convert(&input, &info.shape, [from, to], writer)
        } else {
            self.copy_bytes(&input, writer)
        }
    }

    /// Copies the bytes of a tensor.
    fn copy_bytes(&mut self, input: &TensorBytes<'_>, writer: &mut SafetensorsWriter) -> Result<(), E> {
        let mut buffer = Vec::new();
        for at in (0..input.length).step_by(CHUNK_BYTES) {
            input.read(at, CHUNK_BYTES, &mut buffer)?;
            (self.progress)(buffer.len() as u64);
            writer.write(input.key, &buffer)?;
        }
        Ok(())
    }

    /// Copies the values of a tensor of this `shape` by rows. Changes them if [`Change::touches`] says so, and converts
    /// them from the dtype `from` to the dtype `to`.
    fn convert(
        &mut self,
        input: &TensorBytes<'_>,
        shape: &[usize],
        [from, to]: [DType; 2],
        writer: &mut SafetensorsWriter,
    ) -> Result<(), E> {
        let (source, key) = (self.source, input.key);
        let is_changed = self.change.touches(key);
        let rows = shape.first().copied().unwrap_or(1);
        let columns = input.length / from.size() / rows.max(1);
        let row_bytes = columns * from.size();
        let rows_at_once = (CHUNK_ELEMENTS / columns.max(1)).max(1);
        let (mut buffer, mut values, mut narrowed) = (Vec::new(), Vec::new(), Vec::new());
        let rows_to_copy = if row_bytes == 0 { 0 } else { rows };
        for row in (0..rows_to_copy).step_by(rows_at_once) {
            input.read(row * row_bytes, rows_at_once * row_bytes, &mut buffer)?;
            (self.progress)(buffer.len() as u64);
            widen(from, &buffer, &mut values);
            if is_changed {
                self.change.apply(key, row..row + values.len() / columns, &mut values)?;
            }
            narrow(to, &values, &mut narrowed).map_err(|value| {
                WeightsError::tensor(source.path(), key, format!("{value} is beyond the values of {to}"))
            })?;
            writer.write(key, &narrowed)?;
        }
        Ok(())
    }
}

/// The bytes of a tensor of a source file. A tensor of a safetensors file is read in parts. A tensor of a torch
/// checkpoint can only be read whole.
struct TensorBytes<'a> {
    source: &'a Checkpoint,
    key: &'a str,
    /// The tensor of a torch checkpoint.
    whole: Option<Tensor>,
    /// Number of bytes.
    length: usize,
}

impl<'a> TensorBytes<'a> {
    fn open(source: &'a Checkpoint, key: &'a str) -> Result<Self, WeightsError> {
        Ok(match source.stored_bytes(key) {
            Some(length) => Self { source, key, whole: None, length },
            None => {
                let tensor = source.tensor(key)?;
                Self { source, key, length: tensor.as_bytes().len(), whole: Some(tensor) }
            }
        })
    }

    /// Replaces the contents of `buffer` by the bytes from byte `at` on, at most `limit` of them.
    fn read(&self, at: usize, limit: usize, buffer: &mut Vec<u8>) -> Result<(), WeightsError> {
        let length = limit.min(self.length - at);
        buffer.resize(length, 0);
        match &self.whole {
            Some(tensor) => buffer.copy_from_slice(&tensor.as_bytes()[at..][..length]),
            None => self.source.read_part(self.key, at, buffer)?,
        }
        Ok(())
    }
}

/// The header entry of a tensor in the output. `dtype` is the wanted dtype of floats.
fn entry(source: &Checkpoint, key: &str, dtype: Option<DType>) -> Result<TensorEntry, WeightsError> {
    let info = source.info(key).ok_or_else(|| source.missing(key))?;
    let elements: usize = info.shape.iter().product();
    let (name, bytes, alignment) = match (info.dtype, source.stored_bytes(key)) {
        (Some(from), _) => {
            let to = output_dtype(from, dtype);
            (dtype_name(to), (elements * to.size()) as u64, to.size())
        }
        // A dtype that is not supported is copied byte for byte.
        (None, Some(bytes)) => (info.stored.to_uppercase(), bytes as u64, bytes / elements.max(1)),
        (None, None) => return Err(info.unsupported_dtype(source.path(), key)),
    };
    Ok(TensorEntry { name: key.into(), dtype: name, shape: info.shape.clone(), bytes, alignment })
}

/// The output's dtype: `wanted` for floats; other dtypes are not converted.
fn output_dtype(from: DType, wanted: Option<DType>) -> DType {
    match from {
        DType::F32 | DType::Bf16 | DType::F16 => wanted.unwrap_or(from),
        other => other,
    }
}

/// The common name of all shards: `diffusion_pytorch_model.safetensors`, of a source whose first shard is
/// `diffusion_pytorch_model-00001-of-00003.safetensors`.
fn series_name(source: &Checkpoint) -> String {
    let name = source.path().file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let number_length = "-00001".len();
    let stem = match name.find("-of-").and_then(|at| name.get(..at.checked_sub(number_length)?)) {
        Some(stem) if !stem.is_empty() => stem,
        _ => &name,
    };
    format!("{stem}.safetensors")
}

/// Fails if the output path `path` is a file of the source.
fn refuse_source(source: &Checkpoint, path: &Path) -> Result<(), WeightsError> {
    let is_output = |read: &Path| match (read.canonicalize(), path.canonicalize()) {
        (Ok(read), Ok(written)) => read == written,
        _ => false,
    };
    if source.paths().any(is_output) {
        return Err(WeightsError::Format {
            path: path.into(),
            expected: "another file to write to".into(),
            found: "the one that is read".into(),
        });
    }
    Ok(())
}

/// Replaces `values` by the elements of `bytes`, converted to f32. `bytes` need no alignment.
fn widen(dtype: DType, bytes: &[u8], values: &mut Vec<f32>) {
    values.clear();
    match dtype {
        DType::F32 => values.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
        DType::Bf16 => values.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        DType::F16 => values.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        DType::I64 => values.extend(bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f32)),
        DType::I32 => values.extend(bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b) as f32)),
        DType::U8 | DType::Bool => values.extend(bytes.iter().map(|b| f32::from(*b))),
    }
}

/// Converts `values` to a float type. Fails with the first finite value that the type cannot hold.
fn narrow(dtype: DType, values: &[f32], bytes: &mut Vec<u8>) -> Result<(), f32> {
    bytes.clear();
    match dtype {
        DType::Bf16 => bytes.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
        DType::F16 => {
            if let Some(value) = values.iter().find(|v| v.is_finite() && f16::from_f32(**v).is_infinite()) {
                return Err(*value);
            }
            bytes.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()));
        }
        _ => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
    }
    Ok(())
}
