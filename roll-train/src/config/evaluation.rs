//! The section `evaluation`: what is generated and scored before and after training.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use roll_core::{Error, Result, RewardComponent};

/// Clips that the model generates before and after training, each time from the same noise. Frame size, length and
/// frame rate are those of the section `data`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluationConfig {
    /// CSV or JSONL file of clips that are not trained on, in the format of `data.metadata`. Default: `null`, no such
    /// clips.
    pub metadata: Option<PathBuf>,
    /// Directory that the file names in `evaluation.metadata` are relative to. Default: `null`, the directory of that
    /// file.
    pub base_path: Option<PathBuf>,
    /// Upper limit on the number of clips taken from `evaluation.metadata`; the first rows are taken. At least 1.
    /// Default: `null`, all rows.
    pub samples: Option<usize>,
    /// Number of training clips that are evaluated as well; the first rows of `data.metadata` are taken. Default: 0.
    pub train_samples: usize,
    /// Evaluate also during training, every this many optimizer steps. Default: 0, only before and after training.
    pub every: u64,
    /// Rewards that are measured but never optimised, each with its options. If the trained reward rises and these do
    /// not, suspect reward hacking. Default: an empty list.
    pub check: Vec<RewardComponent>,
}

impl EvaluationConfig {
    /// Checks the ranges of the values; errors name the key in the section `evaluation`.
    pub fn check(&self) -> Result<()> {
        match self.samples {
            Some(0) => Err(Error::config("evaluation.samples", "expected at least 1, found 0")),
            _ => Ok(()),
        }
    }
}
