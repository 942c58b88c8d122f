//! The sums of gradients over samples and ranks.

use std::borrow::Cow;
use std::sync::{Arc, Mutex};

use roll_core::{Communicator, Error, Model, Result};

use super::partition::Partition;
use crate::optimizer::{clear, scale, sum_of_squares};
use crate::overlap::Service;
use crate::sync::lock;

/// Sums of gradients: complete on every rank (stages 0 and 1) or sharded (stages 2 and 3). The sum of an element is
/// bit-identical either way: contributions are added bucket by bucket, in the order of the ranks.
pub(super) struct Gradients {
    partition: Arc<Partition>,
    replicated: bool,
    sums: Mutex<Vec<f32>>,
}

impl Gradients {
    pub(super) fn new(partition: Arc<Partition>, replicated: bool) -> Self {
        let length = if replicated { partition.padded() } else { partition.shard() };
        Self { partition, replicated, sums: Mutex::new(vec![0.0; length]) }
    }

    pub(super) fn clear(&self) {
        clear(&mut lock(&self.sums));
    }

    /// Adds the gradients of `model`, which is on the only rank: its shards are the flat layout.
    pub(super) fn take(&self, model: &mut dyn Model) -> Result<()> {
        model.take_gradients(&mut lock(&self.sums))
    }

    pub(super) fn scale(&self, factor: f64) {
        scale(&mut lock(&self.sums), factor);
    }

    /// The sum of squares over all ranks: the sum of each rank's shards, bucket by bucket, added in the order of the
    /// ranks. Bit-identical whether the sums are sharded or not.
    pub(super) fn sum_of_squares(&self, ranks: &dyn Communicator) -> Result<f64> {
        let sums = lock(&self.sums);
        let buckets = self.partition.buckets();
        let squares = match self.replicated {
            true => (0..self.partition.world())
                .map(|rank| buckets.iter().map(|b| sum_of_squares(&sums[b.padded_own(rank)])).sum())
                .collect(),
            false => {
                let own: f64 = buckets.iter().map(|b| sum_of_squares(&sums[b.in_shard()])).sum();
                ranks.all_gather_f64(own)?
            }
        };
        Ok(squares.iter().sum())
    }

    /// Calls `f` with the sums of bucket `bucket`: the whole padded bucket if `whole` and the sums are replicated, else
    /// the shard of `rank`.
    pub(super) fn with<T>(&self, bucket: usize, rank: usize, whole: bool, f: impl FnOnce(&[f32]) -> T) -> T {
        let sums = lock(&self.sums);
        let bucket = &self.partition.buckets()[bucket];
        f(match (self.replicated, whole) {
            (true, true) => &sums[bucket.padded_at..bucket.padded_at + bucket.part * self.partition.world()],
            (true, false) => &sums[bucket.padded_own(rank)],
            (false, _) => &sums[bucket.in_shard()],
        })
    }
}

impl Service for Gradients {
    /// Reduces bucket `number`; a rank without a contribution adds zeros.
    fn serve(&self, ranks: &dyn Communicator, [number, _]: [u32; 2], contribution: Option<&[f32]>) -> Result<Vec<f32>> {
        let bucket = self.partition.buckets().get(number as usize).ok_or_else(|| {
            Error::Misuse(format!("there is no bucket {number} of gradients: the ranks train different models"))
        })?;
        let world = self.partition.world();
        let add = |sums: &mut [f32], values: &[f32]| sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
        let zeros = || Cow::Owned(vec![0.0; bucket.part * world]);
        let contribution = contribution.map_or_else(zeros, Cow::Borrowed);
        // The sums are locked after the collective, so that a call that clears them does not wait for other ranks.
        match self.replicated {
            true => {
                let mut values = contribution.into_owned();
                ranks.all_reduce(&mut values)?;
                add(&mut lock(&self.sums)[bucket.padded_at..bucket.padded_at + values.len()], &values);
            }
            false => {
                let mut part = vec![0.0; bucket.part];
                ranks.reduce_scatter(&contribution, &mut part)?;
                add(&mut lock(&self.sums)[bucket.in_shard()], &part);
            }
        }
        Ok(Vec::new())
    }
}
