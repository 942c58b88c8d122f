//! Writes safetensors: tensors in memory, or piece by piece, so that no tensor needs to be whole in memory.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use roll_core::{StateDict, Tensor, header};
use roll_external::files;
use serde_json::{Map, Value, json};

use crate::error::WeightsError;
use crate::safetensors::dtype_name;

/// Bytes that are written to the file at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// Writes `state` to `path` atomically: to a temporary file in the same directory, which is synced and renamed over
/// `path`. Readers that have mapped the old file keep the old contents. The same input produces the same bytes.
///
/// Fails if the parent directory is missing. `metadata` becomes the `__metadata__` of the format (strings), together
/// with the metadata that `state` carries ([`roll_core::header`]).
pub fn save_safetensors(
    path: impl AsRef<Path>,
    state: &StateDict,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    let mut metadata = metadata.clone();
    if let Some(carried) = state.get(header::KEY).and_then(|entry| header::read(entry).ok()) {
        // Entries of this prefix are text files to write next to the weights.
        metadata.extend(carried.into_iter().filter(|(name, _)| !name.starts_with(header::BESIDE)));
    }
    let tensors = state.iter().filter(|(name, _)| *name != header::KEY);
    let entries = tensors.map(|(name, tensor)| entry(name, tensor)).collect();
    let mut writer = SafetensorsWriter::create(path, entries, &metadata)?;
    for TensorEntry { name, .. } in writer.order().to_vec() {
        writer.write(&name, state[&name].as_bytes())?;
    }
    writer.finish()
}

/// The header entry of `tensor`.
fn entry(name: &str, tensor: &Tensor) -> TensorEntry {
    TensorEntry {
        name: name.into(),
        dtype: dtype_name(tensor.dtype()),
        shape: tensor.shape().to_vec(),
        bytes: tensor.as_bytes().len() as u64,
        alignment: tensor.dtype().size(),
    }
}

/// A tensor of the file to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name.
    pub name: String,
    /// Dtype as the format spells it (`BF16`).
    pub dtype: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Number of bytes.
    pub bytes: u64,
    /// Bytes per element. Tensors with wider elements come first in the file.
    pub alignment: usize,
}

/// A safetensors file that is being written: the header first, then the bytes of each tensor in order. The file appears
/// under its name when it is complete and synced. If the writer is dropped earlier, nothing remains.
///
/// Readers that have mapped an old file of that name keep the old contents. The same input produces the same bytes.
#[derive(Debug)]
pub struct SafetensorsWriter {
    out: Option<BufWriter<File>>,
    path: PathBuf,
    temporary: PathBuf,
    entries: Vec<TensorEntry>,
    /// Position in `entries` of the tensor that is being written.
    current: usize,
    /// Number of bytes of the current tensor that are still missing.
    missing: u64,
}

impl SafetensorsWriter {
    /// Creates the temporary file and writes the header. Tensors are sorted; [`SafetensorsWriter::order`] returns the
    /// order. Fails if `path` is a directory.
    pub fn create(
        path: impl AsRef<Path>,
        mut entries: Vec<TensorEntry>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        if path.is_dir() {
            return Err(WeightsError::Directory { path: path.into(), hint: "; give the name of a file".into() });
        }
        // The widest elements come first. Since the header's length is a multiple of eight bytes, every tensor is then
        // aligned and can be mapped without a copy.
        entries.sort_by(|a, b| (b.alignment, &a.name).cmp(&(a.alignment, &b.name)));
        let mut header = Map::new();
        if !metadata.is_empty() {
            header.insert("__metadata__".into(), json!(metadata));
        }
        let mut end = 0;
        for entry in &entries {
            let begin = end;
            end += entry.bytes;
            let value = json!({ "dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end] });
            header.insert(entry.name.clone(), value);
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let temporary = files::temporary_beside(path);
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(&temporary);
        let file = file.map_err(WeightsError::io("write", path))?;
        let missing = entries.first().map_or(0, |e| e.bytes);
        let out = BufWriter::with_capacity(BUFFER_BYTES, file);
        let mut writer = Self { out: Some(out), path: path.into(), temporary, entries, current: 0, missing };
        writer.put(&(header.len() as u64).to_le_bytes())?;
        writer.put(&header)?;
        Ok(writer)
    }

    /// The tensors in the order in which their bytes must be written.
    pub fn order(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// Appends bytes of the tensor `name`. Fails if another tensor is next, or if the tensor would become too long.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), WeightsError> {
        self.skip_complete();
        let problem = match self.entries.get(self.current) {
            Some(entry) if entry.name == name && bytes.len() as u64 <= self.missing => {
                self.missing -= bytes.len() as u64;
                return self.put(bytes);
            }
            _ if bytes.is_empty() => return Ok(()),
            Some(entry) => {
                format!("{} bytes of `{}` are missing, got {} of `{name}`", self.missing, entry.name, bytes.len())
            }
            None => format!("every tensor is written, got {} bytes more of `{name}`", bytes.len()),
        };
        Err(WeightsError::invalid(&self.path, problem))
    }

    /// Syncs the file and renames it to its final name. Fails if bytes are missing.
    pub fn finish(mut self) -> Result<(), WeightsError> {
        self.skip_complete();
        if let Some(entry) = self.entries.get(self.current) {
            let problem = format!("{} bytes of `{}` were never written", self.missing, entry.name);
            return Err(WeightsError::invalid(&self.path, problem));
        }
        let Some(out) = self.out.take() else { return Ok(()) };
        let file = out.into_inner().map_err(std::io::IntoInnerError::into_error);
        let renamed = file.and_then(|file| file.sync_all()).and_then(|()| fs::rename(&self.temporary, &self.path));
        if let Err(e) = renamed {
            let _ = fs::remove_file(&self.temporary);
            return Err(WeightsError::io("write", &self.path)(e));
        }
        // The rename reaches the disk once the directory is synced; not every system lets a program open a directory.
        if let Some(directory) = self.path.parent() {
            let _ = files::sync_directory(directory);
        }
        Ok(())
    }

    /// Advances to the first tensor of which bytes are missing. Empty tensors are complete from the beginning.
    fn skip_complete(&mut self) {
        while self.missing == 0 && self.current < self.entries.len() {
            self.current += 1;
            self.missing = self.entries.get(self.current).map_or(0, |e| e.bytes);
        }
    }

    /// Appends bytes to the temporary file.
    fn put(&mut self, bytes: &[u8]) -> Result<(), WeightsError> {
        let Some(out) = &mut self.out else { return Ok(()) };
        out.write_all(bytes).map_err(WeightsError::io("write", &self.path))
    }
}

impl Drop for SafetensorsWriter {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
