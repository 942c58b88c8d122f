//! The order of samples: which samples an optimizer step uses on each rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use roll_core::{Noise, Rank, Result, Sample};

use super::dataset::Dataset;
use super::prefetch::Prefetch;

/// The samples of a rank for one step.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The samples of all micro-batches, in order.
    pub samples: Vec<Sample>,
    /// Rows that were skipped (`on_bad_sample: skip`): the location of each in the metadata, and the reason.
    pub skipped: Vec<(String, String)>,
}

/// Distributes a data set over steps and ranks.
///
/// All passes over the data form one endless sequence. Pass p is the rows in order or, with shuffling, in permutation p
/// of the run's noise. Step s uses the samples `s * n .. (s + 1) * n` of the sequence, where n counts the samples of
/// all ranks, and each rank takes its own slice of them. The samples of a step therefore depend on the step alone:
/// neither the number of ranks (at the same n) nor a resumption of the run changes them. The last step of a run is
/// completed from the next pass.
///
/// If buckets are used, a pass is a sequence of micro-batches. Each micro-batch has clips of one shape, in the order
/// of the permutation; the last one of a shape is completed with the first clips of that shape. The micro-batches of a
/// pass are then shuffled too. Everything else is the same with micro-batches instead of rows.
///
/// The samples of the next `data.prefetch` steps are read while a step runs, which does not change the samples.
#[derive(Debug)]
pub struct Batches {
    dataset: Arc<Dataset>,
    noise: Noise,
    /// Samples per step and rank.
    per_rank: usize,
    rank: Rank,
    world_size: usize,
    /// Samples per micro-batch; 1 if clips need not have one shape.
    micro: usize,
    /// The number of the latest pass and the order of its rows, cached.
    order: Option<(u64, Vec<usize>)>,
    prefetch: Prefetch,
    /// One past the last step; nothing beyond is prefetched.
    end: u64,
}

impl Batches {
    /// Creates the batches of `rank` among `world_size` ranks, with `per_rank` samples per step and rank.
    pub fn new(dataset: Arc<Dataset>, noise: Noise, per_rank: usize, rank: Rank, world_size: usize) -> Self {
        let (per_rank, world_size) = (per_rank.max(1), world_size.max(1));
        Self {
            dataset,
            noise,
            per_rank,
            rank,
            world_size,
            micro: 1,
            order: None,
            prefetch: Prefetch::default(),
            end: u64::MAX,
        }
    }

    /// Groups samples by shape, for a data set with buckets: each `micro` consecutive samples of a rank have one shape.
    /// No effect unless `micro` divides `per_rank`.
    pub fn in_micro_batches(mut self, micro: usize) -> Self {
        let fits = micro > 0 && self.per_rank.is_multiple_of(micro);
        self.micro = if self.dataset.has_buckets() && fits { micro } else { 1 };
        self
    }

    /// Sets the number of steps of the run; later batches are not prefetched.
    pub fn up_to(mut self, steps: u64) -> Self {
        self.end = steps;
        self
    }

    /// The data set.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Number of samples of one step over all ranks.
    pub fn global_batch(&self) -> usize {
        self.per_rank * self.world_size
    }

    /// Number of steps of `epochs` epochs of `data.repeat` passes each, rounded up.
    pub fn steps(&self, epochs: u64) -> u64 {
        let passes = epochs.saturating_mul(self.dataset.config().repeat);
        passes.saturating_mul(self.pass_length() as u64).div_ceil(self.global_batch() as u64)
    }

    /// The epoch (from 0, with a fraction) in which step `step` begins.
    pub fn epoch(&self, step: u64) -> f64 {
        let rows = self.pass_length() as f64 * self.dataset.config().repeat as f64;
        step as f64 * self.global_batch() as f64 / rows.max(1.0)
    }

    /// The rows that this rank uses at step `step`.
    pub fn indices(&mut self, step: u64) -> Vec<usize> {
        let first = step * self.global_batch() as u64 + (self.rank.0 * self.per_rank) as u64;
        (first..first + self.per_rank as u64).map(|position| self.row(position)).collect()
    }

    /// The prompts of this rank's samples from step `step` on: of the fewest whole steps, at least one, that have
    /// `count` samples together. Rows without a prompt are left out.
    pub fn prompts(&mut self, step: u64, count: usize) -> Vec<String> {
        let steps = count.div_ceil(self.per_rank).max(1) as u64;
        let indices: Vec<usize> = (step..step.saturating_add(steps)).flat_map(|step| self.indices(step)).collect();
        let rows = indices.into_iter().map(|index| &self.dataset.metadata().rows[index]);
        rows.filter(|row| row.no_prompt.is_none()).map(|row| row.prompt.clone()).collect()
    }

    /// Reads the samples of step `step` and prefetches later steps. A bad row is an error or skipped, as
    /// `data.on_bad_sample` says.
    pub fn batch(&mut self, step: u64) -> Result<Batch> {
        let rows = self.indices(step);
        let samples = self.prefetch.take(&self.dataset, &rows)?;
        // The first `prefetch.len()` steps after `step` are pending already.
        for pending in self.prefetch.len() as u64..self.dataset.config().prefetch as u64 {
            let next = step + 1 + pending;
            if next < self.end {
                let rows = self.indices(next);
                self.prefetch.begin(&self.dataset, rows);
            }
        }
        let mut batch = Batch::default();
        for sample in samples {
            match sample {
                Ok(sample) => batch.samples.push(sample),
                Err(skipped) => batch.skipped.push(skipped),
            }
        }
        Ok(batch)
    }

    /// The row at a position of the endless sequence.
    fn row(&mut self, position: u64) -> usize {
        let n = self.pass_length();
        let (pass, within) = (position / n as u64, (position % n as u64) as usize);
        let rows = match self.order.take() {
            Some((latest, rows)) if latest == pass => rows,
            _ => self.rows_of_pass(pass),
        };
        let row = rows[within];
        self.order = Some((pass, rows));
        row
    }

    /// The rows of a pass, in order.
    fn rows_of_pass(&self, pass: u64) -> Vec<usize> {
        let (n, shuffle) = (self.dataset.len(), self.dataset.config().shuffle);
        let rows: Vec<usize> = if shuffle { self.noise.permutation(pass, n) } else { (0..n).collect() };
        if self.micro == 1 {
            return rows;
        }
        let mut rows_by_shape: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for row in rows {
            rows_by_shape.entry(self.dataset.bucket(row)).or_default().push(row);
        }
        let mut batches: Vec<Vec<usize>> = Vec::new();
        for rows in rows_by_shape.values() {
            let filled = rows.len().next_multiple_of(self.micro);
            let rows: Vec<usize> = rows.iter().copied().cycle().take(filled).collect();
            batches.extend(rows.chunks(self.micro).map(<[usize]>::to_vec));
        }
        if shuffle {
            // No pass number has the highest bit, so this permutation is independent of the permutation of the rows.
            let order = self.noise.permutation(pass | 1 << 63, batches.len());
            return order.into_iter().flat_map(|i| std::mem::take(&mut batches[i])).collect();
        }
        // Without shuffling, the micro-batches follow the order of the rows, not of the shapes.
        batches.sort();
        batches.concat()
    }

    /// Number of rows of a pass, including rows that are repeated to complete a micro-batch.
    fn pass_length(&self) -> usize {
        if self.micro == 1 {
            return self.dataset.len();
        }
        let mut count_by_shape: BTreeMap<_, usize> = BTreeMap::new();
        (0..self.dataset.len()).for_each(|row| *count_by_shape.entry(self.dataset.bucket(row)).or_default() += 1);
        count_by_shape.values().map(|count| count.next_multiple_of(self.micro)).sum()
    }
}
