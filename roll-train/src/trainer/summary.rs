//! The summary of a run, and the result files that are written at its end.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::sync::LazyLock;

use roll_backends::device::memory;
use roll_core::{Communicator, Error, Headline, Result, communicator};

use super::{Trainer, state};
use crate::results::record::{self, Skipped};
use crate::results::{self, trajectories};
use crate::run_dir::RunDir;
use crate::task::{TaskFacts, TaskResults, remove_up_to};

/// The summary of a run that has ended, as in `summary.json`.
#[derive(Debug, serde::Serialize)]
pub struct RunSummary {
    /// Steps taken.
    pub steps: u64,
    /// The reason, if the run ended before its last step (`evaluation.stop_when`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    /// Wall-clock seconds of the training loop.
    pub seconds: f64,
    /// Peak of host memory of each process in bytes, mapped files included, in the order of the ranks; `null` if the
    /// system does not count it. If the run was resumed, these are the peaks of its last processes.
    pub peak_memory: Vec<Option<u64>>,
    /// Number of trainable parameters.
    pub parameters: usize,
    /// Metrics of the first step.
    pub first: BTreeMap<String, f64>,
    /// Metrics of the last step.
    pub last: BTreeMap<String, f64>,
    /// Number of samples that were left out.
    pub skipped_samples: u64,
    /// The first samples that were left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<Skipped>,
    /// Number of updates that were left out because a value was not finite.
    pub skipped_updates: u64,
    /// Number of updates whose gradient was scaled down to `training.max_grad_norm`.
    pub clipped_updates: u64,
    /// The files of the trained adapters, or of the experts if all their weights are trained.
    pub adapter: Vec<PathBuf>,
    /// Measurements before and after training: `unseen_before`, `unseen_after`, `unseen_gain`, ..., `kl`; for an agent
    /// `success_before`, `success_after`.
    #[serde(flatten)]
    pub figures: BTreeMap<String, serde_json::Value>,
    /// The measurements of `figures` in words, each with a name and a text.
    #[serde(skip)]
    pub lines: Vec<(String, String)>,
    /// Numbers of encodings that were found in `data.cache_dir`, and that were computed.
    #[serde(skip)]
    pub encodings: Option<[u64; 2]>,
    /// The metrics to show first.
    #[serde(skip)]
    pub headlines: Vec<Headline>,
    /// Files and folders with results that people may open: name and path.
    #[serde(skip)]
    pub written: Vec<(&'static str, PathBuf)>,
    /// The run directory; `None` on all ranks but 0.
    #[serde(skip)]
    pub dir: Option<RunDir>,
}

impl Trainer {
    /// Writes the result files of a run, and returns its summary. All ranks must call this.
    pub(super) fn finish(self, dir: Option<&RunDir>) -> Result<RunSummary> {
        let peak_memory = peak_memory_of_processes(self.strategy.ranks().all.as_ref())?;
        let TaskFacts { headlines, labels, .. } = self.task.facts();
        let figures = results::figures(&self.record, headlines, labels);
        let mut summary = RunSummary {
            steps: self.steps_done,
            stopped: self.early_stop_reason.clone(),
            seconds: self.record.seconds,
            peak_memory,
            parameters: self.model.parameter_count(),
            first: record::restored(&self.record.first),
            last: record::restored(&self.record.last),
            skipped_samples: self.record.skipped_samples,
            skipped: self.record.skipped.clone(),
            skipped_updates: self.record.skipped_updates,
            clipped_updates: self.record.clipped_updates,
            adapter: self.saved.as_ref().map(state::adapter_files).unwrap_or_default(),
            figures,
            lines: results::lines(&self.record, headlines, labels),
            encodings: None,
            headlines: headlines.clone(),
            written: Vec::new(),
            dir: dir.cloned(),
        };
        if let Some(dir) = dir {
            remove_up_to(dir, self.steps_done)?;
            let json = serde_json::to_value(&summary).map_err(Error::failed("writing the summary"))?;
            dir.write_summary(&json)?;
            summary.written.extend(results::write_curves(dir, headlines)?);
        }
        let TaskResults { written, encodings } = self.task.results(dir, &self.record)?;
        summary.encodings = encodings;
        if let Some(dir) = dir {
            summary.written.extend(written);
            summary.written.push(results::write_report(dir)?);
            summary.written.extend(trajectories::existing_file(dir).map(|path| ("trajectories", path)));
        }
        Ok(summary)
    }
}

/// The peak of host memory of each process. Ranks that are threads of one process are counted once.
fn peak_memory_of_processes(ranks: &dyn Communicator) -> Result<Vec<Option<u64>>> {
    // A random number for this process. Processes on two machines may have the same process id.
    static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());
    let mut peaks = communicator::join(ranks, &(*PROCESS, memory::host_peak()))?;
    peaks.dedup_by_key(|(process, _)| *process);
    Ok(peaks.into_iter().map(|(_, bytes)| bytes).collect())
}
