//! What a component is made with, besides its options.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::{Communicator, SingleRank};

/// Where a model keeps its frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightPlacement {
    /// Whole, on the device of each rank.
    Resident,
    /// Weights are in files or host memory and are copied to the device block by block.
    Streamed,
    /// Sharded over the ranks and gathered block by block.
    Sharded,
}

/// Facts of the run that a component may need when it is made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BuildContext {
    /// Backend and device, as `--backend` takes them: `flex`, `libtorch`, `cuda:1`.
    pub backend: String,
    /// Seed of the run, for initial parameters.
    pub seed: u64,
    /// Directory that relative paths of the options start from.
    pub base_dir: PathBuf,
    /// Where the strategy wants frozen weights to be; a model may follow it where its own options leave it open.
    pub placement: Option<WeightPlacement>,
    /// Passes that the algorithm records at a time ([`crate::plan::Passes::held`]), if its plan is known.
    #[serde(default)]
    pub recorded_passes: Option<usize>,
    /// The component is opened to be checked: a model reads the headers of its files and no weights, so that no pass
    /// through its network is possible, and downloads nothing.
    #[serde(default)]
    pub headers_only: bool,
    /// The directory of the run, from its first step on: components are made before it.
    #[serde(skip)]
    pub run_dir: Arc<OnceLock<PathBuf>>,
    /// The ranks of the job. A component of a plugin receives them if it is a strategy or an algorithm.
    #[serde(skip, default = "alone")]
    pub ranks: Arc<dyn Communicator>,
    /// The ranks that a model is to shard the tokens of each pass over ([`crate::StrategyRanks::tokens`]).
    #[serde(skip)]
    pub token_ranks: Option<Arc<dyn Communicator>>,
}

fn alone() -> Arc<dyn Communicator> {
    Arc::new(SingleRank)
}

impl BuildContext {
    /// A context of one rank, with seed 0 and paths that start from the working directory.
    pub fn new(backend: impl Into<String>) -> Self {
        let backend = backend.into();
        Self {
            backend,
            seed: 0,
            base_dir: ".".into(),
            placement: None,
            recorded_passes: None,
            headers_only: false,
            run_dir: Arc::default(),
            ranks: alone(),
            token_ranks: None,
        }
    }

    /// `path` from where relative paths start; unchanged where that is the working directory.
    pub fn resolve(&self, path: impl AsRef<Path>) -> PathBuf {
        match self.base_dir == Path::new(".") {
            true => path.as_ref().into(),
            false => self.base_dir.join(path),
        }
    }
}
