//! Writing safetensors.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use roll_core::{StateDict, Tensor};
use serde_json::{Map, Value, json};

use super::error::WeightsError;
use super::safetensors::dtype_name;

/// Writes `state` to `path`, whole or not at all: to a temporary file in the same directory, synced, then renamed
/// over `path`. Readers that have the old file mapped keep the old contents. The same input gives the same bytes.
///
/// Missing parent directories are an error. Metadata are what `__metadata__` of the format holds: strings.
pub fn save_safetensors(
    path: impl AsRef<Path>,
    state: &StateDict,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    let path = path.as_ref();
    if path.is_dir() {
        return Err(WeightsError::Directory { path: path.into(), hint: "; give the name of a file".into() });
    }
    let temporary = temporary_name(path)?;
    let written = write(&temporary, state, metadata)
        .map_err(WeightsError::io("write", &temporary))
        .and_then(|()| fs::rename(&temporary, path).map_err(WeightsError::io("write", path)));
    match written {
        Ok(()) => {
            // The rename itself reaches the disk with the directory; not every system lets one open a directory.
            if let Some(Ok(directory)) = path.parent().map(File::open) {
                let _ = directory.sync_all();
            }
            Ok(())
        }
        Err(e) => {
            let _ = fs::remove_file(&temporary);
            Err(e)
        }
    }
}

fn temporary_name(path: &Path) -> Result<PathBuf, WeightsError> {
    let name = path.file_name().ok_or_else(|| WeightsError::Format {
        path: path.into(),
        expected: "the name of a file to write".into(),
        found: "a path without one".into(),
    })?;
    Ok(path.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id())))
}

fn write(path: &Path, state: &StateDict, metadata: &BTreeMap<String, String>) -> std::io::Result<()> {
    // Widest elements first: with a header of a multiple of eight bytes every tensor is then aligned, and can be
    // mapped without a copy.
    let mut order: Vec<(&String, &Tensor)> = state.iter().collect();
    order.sort_by_key(|(name, tensor)| (std::cmp::Reverse(tensor.dtype().size()), *name));
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".into(), json!(metadata));
    }
    let mut end = 0;
    for (name, tensor) in &order {
        let begin = end;
        end += tensor.as_bytes().len();
        let entry =
            json!({ "dtype": dtype_name(tensor.dtype()), "shape": tensor.shape(), "data_offsets": [begin, end] });
        header.insert((*name).clone(), entry);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let mut out = BufWriter::new(file);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (_, tensor) in order {
        out.write_all(tensor.as_bytes())?;
    }
    out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
}
