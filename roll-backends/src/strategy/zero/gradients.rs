//! The sums of gradients over samples and ranks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roll_core::{Communicator, Error, Result};

use super::partition::Partition;
use crate::optimizer::{scale, sum_of_squares};
use crate::overlap::Service;

/// Sums of gradients: complete on every rank (stages 0 and 1) or sharded (stages 2 and 3). The sum of an element is
/// bit-identical either way: contributions are added bucket by bucket, in the order of the ranks.
pub(super) struct Gradients {
    partition: Arc<Partition>,
    whole: bool,
    sums: Mutex<Vec<f32>>,
}

impl Gradients {
    pub(super) fn new(partition: Arc<Partition>, whole: bool) -> Self {
        let length = if whole { partition.padded() } else { partition.shard() };
        Self { partition, whole, sums: Mutex::new(vec![0.0; length]) }
    }

    pub(super) fn clear(&self) {
        self.lock().fill(0.0);
    }

    /// Multiplies all sums.
    pub(super) fn scale(&self, factor: f64) {
        scale(&mut self.lock(), factor);
    }

    /// The sum of squares over all ranks: the sum of each rank's shards, bucket by bucket, added in the order of the
    /// ranks. Bit-identical whether the sums are sharded or not.
    pub(super) fn sum_of_squares(&self, ranks: &dyn Communicator) -> Result<f64> {
        let sums = self.lock();
        let buckets = self.partition.buckets();
        let squares = match self.whole {
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

    /// Calls `f` with the sums of bucket `bucket`: the whole padded bucket if `whole` and the sums are complete, else
    /// the shard of `rank`.
    pub(super) fn with<T>(&self, bucket: usize, rank: usize, whole: bool, f: impl FnOnce(&[f32]) -> T) -> T {
        let sums = self.lock();
        let bucket = &self.partition.buckets()[bucket];
        f(match (self.whole, whole) {
            (true, true) => &sums[bucket.padded_at..bucket.padded_at + bucket.part * self.partition.world()],
            (true, false) => &sums[bucket.padded_own(rank)],
            (false, _) => &sums[bucket.in_shard()],
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<f32>> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service for Gradients {
    /// Reduces bucket `what[0]`; a rank without an offer adds zeros.
    fn serve(&self, ranks: &dyn Communicator, what: [u32; 2], offer: Option<&[f32]>) -> Result<Vec<f32>> {
        let bucket = self.partition.buckets().get(what[0] as usize).ok_or_else(|| {
            Error::Misuse(format!("there is no bucket {} of gradients: the ranks train different models", what[0]))
        })?;
        let world = self.partition.world();
        let add = |sums: &mut [f32], values: &[f32]| sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
        let offer = match offer {
            Some(offer) => std::borrow::Cow::Borrowed(offer),
            None => std::borrow::Cow::Owned(vec![0.0; bucket.part * world]),
        };
        // The sums are locked after the collective, so that a call that clears them does not wait for other ranks.
        match self.whole {
            true if world == 1 => add(&mut self.lock()[bucket.in_shard()], &offer),
            true => {
                let mut values = offer.into_owned();
                ranks.all_reduce(&mut values)?;
                add(&mut self.lock()[bucket.padded_at..bucket.padded_at + values.len()], &values);
            }
            false => {
                let mut part = vec![0.0; bucket.part];
                ranks.reduce_scatter(&offer, &mut part)?;
                add(&mut self.lock()[bucket.in_shard()], &part);
            }
        }
        Ok(Vec::new())
    }
}
