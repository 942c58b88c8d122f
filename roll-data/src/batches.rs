//! Which samples an optimizer step sees.

use std::sync::Arc;

use roll_core::{Noise, Rank, Result, Sample};

use crate::Dataset;

/// The samples of a rank for one step.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// All micro-batches of the step, one after the other.
    pub samples: Vec<Sample>,
    /// Rows left out (`on_bad_sample: skip`): where, and why.
    pub skipped: Vec<(String, String)>,
}

/// Deals out a data set.
///
/// All passes over the data form one endless sequence: pass p is the rows in their order, or in the permutation p of
/// the run's noise. Step s takes the samples `s * n .. (s + 1) * n` of it, n being those of all ranks together, and a
/// rank its own slice of them. So what a step sees depends on the step alone: not on the number of ranks (at the same
/// n), nor on whether the run was resumed. The last step of a run is filled up from the pass after.
#[derive(Clone, Debug)]
pub struct Batches {
    dataset: Arc<Dataset>,
    noise: Noise,
    per_rank: usize,
    rank: Rank,
    world_size: usize,
    order: Option<(u64, Vec<usize>)>,
}

impl Batches {
    /// `per_rank` samples a step for this `rank` of `world_size`.
    pub fn new(dataset: Arc<Dataset>, noise: Noise, per_rank: usize, rank: Rank, world_size: usize) -> Self {
        Self { dataset, noise, per_rank: per_rank.max(1), rank, world_size: world_size.max(1), order: None }
    }

    /// Samples of one step over all ranks.
    pub fn global_batch(&self) -> usize {
        self.per_rank * self.world_size
    }

    /// Steps of `epochs` epochs of `data.repeat` passes each, rounded up.
    pub fn steps(&self, epochs: u64) -> u64 {
        let passes = epochs.saturating_mul(self.dataset.config().repeat);
        passes.saturating_mul(self.dataset.len() as u64).div_ceil(self.global_batch() as u64)
    }

    /// The epoch, from 0, that step `step` begins in, with its fraction.
    pub fn epoch(&self, step: u64) -> f64 {
        let rows = self.dataset.len() as f64 * self.dataset.config().repeat as f64;
        step as f64 * self.global_batch() as f64 / rows.max(1.0)
    }

    /// Rows that this rank takes at step `step`.
    pub fn indices(&mut self, step: u64) -> Vec<usize> {
        let first = step * self.global_batch() as u64 + (self.rank.0 * self.per_rank) as u64;
        (first..first + self.per_rank as u64).map(|position| self.row(position)).collect()
    }

    /// The samples of step `step`. A bad row is an error, or left out, as `data.on_bad_sample` says.
    pub fn batch(&mut self, step: u64) -> Result<Batch> {
        let mut batch = Batch::default();
        for index in self.indices(step) {
            match self.dataset.sample_or_skip(index)? {
                Ok(sample) => batch.samples.push(sample),
                Err(skipped) => batch.skipped.push(skipped),
            }
        }
        Ok(batch)
    }

    fn row(&mut self, position: u64) -> usize {
        let n = self.dataset.len();
        let (pass, within) = (position / n as u64, (position % n as u64) as usize);
        if !self.dataset.config().shuffle {
            return within;
        }
        match &mut self.order {
            Some((p, order)) if *p == pass => order[within],
            other => other.insert((pass, self.noise.permutation(pass, n))).1[within],
        }
    }
}
