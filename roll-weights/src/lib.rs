//! Weight files: safetensors (single, sharded, mapped) and torch checkpoints are read lazily, safetensors are written
//! atomically.
//!
//! [`Checkpoint`] opens the weights of a network, [`save_safetensors`] writes tensors. The networks, which define the
//! tensors they need, are in `roll-models`.

mod checkpoint;
mod eight_bits;
mod error;
mod file;
mod info;
mod pth;
mod rewrite;
mod safetensors;
mod save;
mod writer;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use checkpoint::Checkpoint;
pub use eight_bits::is_auxiliary;
pub use error::WeightsError;
pub use file::WeightFile;
pub use info::TensorInfo;
pub use rewrite::{Change, Outputs, rewrite};
pub use safetensors::parse_safetensors;
pub use save::save_safetensors;
pub use writer::{SafetensorsWriter, TensorEntry};

/// Returns the weight files that match a glob, sorted. Indexes of shards and other files are ignored. Fails if no file
/// matches.
pub fn expand_glob(pattern: &str) -> Result<Vec<PathBuf>, WeightsError> {
    let matches = glob::glob(pattern).map_err(|e| WeightsError::invalid(pattern, format!("not a pattern: {e}")))?;
    let mut paths = Vec::new();
    for path in matches {
        let path = path.map_err(|e| {
            let path = e.path().to_path_buf();
            WeightsError::io("read", path)(e.into())
        })?;
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        if path.is_file() && matches!(extension.as_str(), "safetensors" | "pth" | "pt" | "bin" | "ckpt") {
            paths.push(path);
        }
    }
    paths.sort();
    match paths.is_empty() {
        true => Err(WeightsError::NoMatch { pattern: pattern.into() }),
        false => Ok(paths),
    }
}
