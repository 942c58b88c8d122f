//! The option `model_paths`: where the weight files are.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The value of `model_paths`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a path, or a list whose entries are a path or a list of shards")]
pub enum ModelPaths {
    /// A JSON file with the list, or a directory.
    Path(PathBuf),
    /// The list.
    List(Vec<PathEntry>),
}

impl From<PathBuf> for ModelPaths {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

/// One entry of a list of weight files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PathEntry {
    /// A file, an index of shards, a glob, or a directory of the official or the diffusers layout.
    One(String),
    /// The shards of one network.
    Shards(Vec<String>),
}
