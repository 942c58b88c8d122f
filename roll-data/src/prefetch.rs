//! Batches that are decoded while a step runs.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use roll_core::{Result, Sample};

use crate::Dataset;

/// The result of a row: its sample, or its name and why it was left out.
pub(crate) type Read = std::result::Result<Sample, (String, String)>;

/// Rows that are being read, each list on a thread of its own.
///
/// A list that is never asked for is read and forgotten. Threads end by themselves: their files are as large as those
/// of one batch.
#[derive(Debug, Default)]
pub(crate) struct Prefetch {
    ahead: VecDeque<(Vec<usize>, JoinHandle<Result<Vec<Read>>>)>,
}

impl Prefetch {
    /// The samples of `rows`, whether they were read ahead or not: the same ones, and the same error.
    pub fn take(&mut self, dataset: &Dataset, rows: &[usize]) -> Result<Vec<Read>> {
        while let Some((ahead, reading)) = self.ahead.pop_front() {
            if ahead == rows {
                return reading.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
        }
        read(dataset, rows)
    }

    /// Begins to read `rows`, which follow those that are being read.
    pub fn begin(&mut self, dataset: &Arc<Dataset>, rows: Vec<usize>) {
        let dataset = Arc::clone(dataset);
        let own = rows.clone();
        let reading = thread::Builder::new().name("prefetch".into()).spawn(move || read(&dataset, &own));
        // Without a thread they are read when they are asked for.
        if let Ok(reading) = reading {
            self.ahead.push_back((rows, reading));
        }
    }

    /// How many lists are being read, or wait to be taken.
    pub fn len(&self) -> usize {
        self.ahead.len()
    }
}

/// Up to the first row that is an error.
fn read(dataset: &Dataset, rows: &[usize]) -> Result<Vec<Read>> {
    rows.iter().map(|row| dataset.sample_or_skip(*row)).collect()
}
