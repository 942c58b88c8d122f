//! Prefetches batches while a step runs.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use roll_core::{Result, Sample};

use super::dataset::Dataset;

/// The result of reading a row: its sample, or the row's location in the metadata and the reason why it was skipped.
pub(crate) type ReadRow = std::result::Result<Sample, (String, String)>;

/// Batches in flight, as lists of rows, each read on its own thread.
///
/// A batch that is never requested is still read, and is dropped when a later one is taken. A thread ends after its
/// batch.
#[derive(Debug, Default)]
pub(crate) struct Prefetch {
    /// The rows of each batch, and the thread that reads them.
    pending: VecDeque<(Vec<usize>, JoinHandle<Result<Vec<ReadRow>>>)>,
}

impl Prefetch {
    /// Returns the samples of `rows`, prefetched or read now: the same samples and the same error either way.
    /// Drops batches that were begun earlier and not requested.
    pub fn take(&mut self, dataset: &Dataset, rows: &[usize]) -> Result<Vec<ReadRow>> {
        while let Some((pending, thread)) = self.pending.pop_front() {
            if pending == rows {
                return thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
        }
        read(dataset, rows)
    }

    /// Starts to read `rows`, which follow the rows in flight.
    pub fn begin(&mut self, dataset: &Arc<Dataset>, rows: Vec<usize>) {
        let dataset = Arc::clone(dataset);
        let list = rows.clone();
        let thread = thread::Builder::new().name("prefetch".into()).spawn(move || read(&dataset, &list));
        // If no thread can be started, the rows are read on request.
        if let Ok(thread) = thread {
            self.pending.push_back((rows, thread));
        }
    }

    /// Number of batches begun and not taken.
    pub fn len(&self) -> usize {
        self.pending.len()
    }
}

/// Reads rows, up to the first error.
fn read(dataset: &Dataset, rows: &[usize]) -> Result<Vec<ReadRow>> {
    rows.iter().map(|row| dataset.sample_or_skip(*row)).collect()
}
