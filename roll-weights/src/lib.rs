//! Weight files: safetensors (single, sharded, mapped) and torch checkpoints are read lazily, safetensors are written
//! atomically.
//!
//! [`Checkpoint`] opens the weights of a network, [`save_safetensors`] writes tensors. The networks, which define the
//! tensors they need, are in `roll-wan` and `roll-causal-lm`.
//!
//! The crate is for `roll-network`, on which networks are built, and for `roll-train`, which writes checkpoints. It
//! depends on `roll-core`, `roll-external` and `roll-backends` (for the eight-bit formats), and on no other crate of
//! this project. Start reading at [`Checkpoint`] (`checkpoint.rs`), then [`WeightFile`] (`file.rs`), one shard of a
//! checkpoint.
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use roll_core::{StateDict, Tensor};
//! use roll_weights::{Checkpoint, save_safetensors};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let path = std::env::temp_dir().join(format!("roll-doc-{}.safetensors", std::process::id()));
//! let state = StateDict::from([("proj.weight".to_string(), Tensor::full([2, 3], 0.5))]);
//! save_safetensors(&path, &state, &BTreeMap::from([("step".into(), "200".into())]))?;
//!
//! let checkpoint = Checkpoint::open(&path)?; // reads the header; a tensor is read when it is asked for
//! assert_eq!(checkpoint.keys().collect::<Vec<_>>(), ["proj.weight"]);
//! assert_eq!(checkpoint.info("proj.weight").map(|info| info.shape.clone()), Some(vec![2, 3]));
//! assert_eq!(checkpoint.metadata()["step"], "200");
//! assert_eq!(checkpoint.tensor("proj.weight")?.f32s()?, [0.5; 6]);
//!
//! let missing = checkpoint.tensor("proj.bias").expect_err("only the weight was written");
//! assert!(missing.to_string().contains("proj.bias"));
//! # std::fs::remove_file(&path)?;
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod checkpoint;
mod eight_bits;
mod error;
mod file;
mod pth;
mod rewrite;
mod safetensors;
mod tensor_info;
mod writer;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use checkpoint::{ChangeOnRead, Checkpoint};
pub use eight_bits::is_auxiliary;
pub use error::WeightsError;
pub use file::WeightFile;
pub use rewrite::{Change, Outputs, rewrite};
pub use safetensors::parse_safetensors;
pub use tensor_info::TensorInfo;
pub use writer::{SafetensorsWriter, TensorEntry, save_safetensors};

/// Directory within a checkpoint for the averaged adapters, which the evaluations of a run use if it averages its
/// weights. A checkpoint that is opened as an adapter means these, if it has them.
pub const AVERAGED: &str = "averaged";

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
    if paths.is_empty() {
        return Err(WeightsError::NoMatch { pattern: pattern.into() });
    }
    Ok(paths)
}
