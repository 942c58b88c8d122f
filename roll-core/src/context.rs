//! Facts of the run that every component is made with, besides its own options.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::{Communicator, SingleRank};

/// Where a model keeps its frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightPlacement {
    /// Weights are whole on the device of each rank.
    Resident,
    /// Weights are in files or host memory and are copied to the device block by block.
    Streamed,
    /// Weights are sharded over the ranks and gathered block by block.
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
    /// Where the strategy wants the frozen weights. A model follows it if its own options leave the place open.
    pub placement: Option<WeightPlacement>,
    /// Passes that the algorithm records at a time ([`crate::plan::Passes::held`]), if its plan is known.
    #[serde(default)]
    pub recorded_passes: Option<usize>,
    /// Whether passes of the reference policy may be asked of the model ([`crate::Adapter::Off`]). Without them, a model
    /// of which every weight is trained keeps no copy of the weights that training starts from.
    #[serde(default = "kept")]
    pub needs_reference: bool,
    /// Whether the component is opened for a check only. For a check, a model downloads nothing and reads the headers
    /// of its files but no weights, so that no pass through its network is possible.
    #[serde(default)]
    pub headers_only: bool,
    /// The directory of the run. It is set after the components are made, before the first step.
    #[serde(skip)]
    pub run_dir: Arc<OnceLock<PathBuf>>,
    /// The ranks of the job. A component of a plugin receives them if it is a strategy or an algorithm.
    #[serde(skip, default = "alone")]
    pub ranks: Arc<dyn Communicator>,
    /// The ranks over which a model shards the tokens of each pass ([`crate::StrategyRanks::tokens`]).
    #[serde(skip)]
    pub token_ranks: Option<Arc<dyn Communicator>>,
}

/// A reference policy is kept unless the algorithm's plan says that it needs none.
fn kept() -> bool {
    true
}

/// A job of one rank.
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
            needs_reference: true,
            headers_only: false,
            run_dir: Arc::default(),
            ranks: alone(),
            token_ranks: None,
        }
    }

    /// `path` below [`BuildContext::base_dir`] if it is relative; unchanged if it is absolute or the directory is `.`.
    pub fn resolve(&self, path: impl AsRef<Path>) -> PathBuf {
        if self.base_dir == Path::new(".") { path.as_ref().into() } else { self.base_dir.join(path) }
    }
}
