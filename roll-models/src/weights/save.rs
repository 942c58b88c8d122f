//! Writes tensors in memory to safetensors files.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{StateDict, Tensor, header};

use super::error::WeightsError;
use super::safetensors::dtype_name;
use super::writer::{SafetensorsWriter, TensorEntry};

/// Writes `state` to `path` atomically: to a temporary file in the same directory, which is synced and renamed over
/// `path`. Readers that have the old file mapped keep the old contents. The same input produces the same bytes.
///
/// Fails if the parent directory is missing. `metadata` becomes the `__metadata__` of the format (strings), together
/// with the metadata that `state` carries ([`roll_core::header`]).
pub fn save_safetensors(
    path: impl AsRef<Path>,
    state: &StateDict,
    metadata: &BTreeMap<String, String>,
) -> Result<(), WeightsError> {
    let mut metadata = metadata.clone();
    if let Some(words) = state.get(header::KEY).and_then(|entry| header::read(entry).ok()) {
        metadata.extend(words);
    }
    let tensors = state.iter().filter(|(name, _)| *name != header::KEY);
    let entries = tensors.map(|(name, tensor)| entry(name, tensor)).collect();
    let mut writer = SafetensorsWriter::create(path, entries, &metadata)?;
    for TensorEntry { name, .. } in writer.order().to_vec() {
        writer.write(&name, state[&name].as_bytes())?;
    }
    writer.finish()
}

fn entry(name: &str, tensor: &Tensor) -> TensorEntry {
    TensorEntry {
        name: name.into(),
        dtype: dtype_name(tensor.dtype()).into(),
        shape: tensor.shape().to_vec(),
        bytes: tensor.as_bytes().len() as u64,
        alignment: tensor.dtype().size(),
    }
}
