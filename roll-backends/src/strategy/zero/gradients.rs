//! The sums of gradients over samples and ranks, in host memory. They are reduced bucket by bucket, as a service of the
//! ranks (see `overlap`), because ranks come to a bucket at different times.

use std::borrow::Cow;
use std::ops::Range;
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
    /// Whether every rank has the complete sums.
    is_replicated: bool,
    /// All padded buckets if replicated, else all shards of this rank.
    sums: Mutex<Vec<f32>>,
}

/// The sums of a bucket that a caller reads; see [`Gradients::read_bucket`].
pub(super) enum BucketSums {
    /// The whole padded bucket.
    Whole,
    /// The shard of this rank.
    ShardOf(usize),
}

impl Gradients {
    pub(super) fn new(partition: Arc<Partition>, is_replicated: bool) -> Self {
        let length = if is_replicated { partition.padded_len() } else { partition.shards_len() };
        Self { partition, is_replicated, sums: Mutex::new(vec![0.0; length]) }
    }

    pub(super) fn clear(&self) {
        clear(&mut lock(&self.sums));
    }

    /// Takes the gradients of `model` and adds them to the sums without a reduction, for a job of one rank, where the
    /// sums have the flat layout.
    pub(super) fn take_from(&self, model: &mut dyn Model) -> Result<()> {
        model.take_gradients(&mut lock(&self.sums))
    }

    /// Adds to some elements of the flat layout, for a job of one rank.
    pub(super) fn add(&self, place: Range<usize>, values: &[f32]) {
        lock(&self.sums)[place].iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }

    pub(super) fn scale(&self, factor: f64) {
        scale(&mut lock(&self.sums), factor);
    }

    /// The sum of squares of all elements. It is computed for the shards of each rank, bucket by bucket, and then added
    /// in the order of the ranks, so that it is bit-identical whether the sums are sharded or not.
    pub(super) fn sum_of_squares(&self, ranks: &dyn Communicator) -> Result<f64> {
        let sums = lock(&self.sums);
        let buckets = self.partition.buckets();
        let squares_by_rank = if self.is_replicated {
            let of_rank =
                |rank| -> f64 { buckets.iter().map(|b| sum_of_squares(&sums[b.padded_shard_of(rank)])).sum() };
            (0..self.partition.world()).map(of_rank).collect()
        } else {
            let own: f64 = buckets.iter().map(|b| sum_of_squares(&sums[b.in_own_shards()])).sum();
            ranks.all_gather_f64(own)?
        };
        Ok(squares_by_rank.iter().sum())
    }

    /// Calls `read` with the sums `which` of bucket `number`. If the sums are sharded, `read` gets the shard of this
    /// rank whatever `which` is.
    pub(super) fn read_bucket<T>(&self, number: usize, which: BucketSums, read: impl FnOnce(&[f32]) -> T) -> T {
        let sums = lock(&self.sums);
        let bucket = &self.partition.buckets()[number];
        let range = match which {
            _ if !self.is_replicated => bucket.in_own_shards(),
            BucketSums::Whole => bucket.padded_at..bucket.padded_at + bucket.shard_len * self.partition.world(),
            BucketSums::ShardOf(rank) => bucket.padded_shard_of(rank),
        };
        read(&sums[range])
    }
}

impl Service for Gradients {
    /// Sums the contributions of all ranks to bucket `number`, and adds the result to the sums of gradients. A rank
    /// without a contribution adds zeros.
    fn serve(&self, ranks: &dyn Communicator, [number, _]: [u32; 2], contribution: Option<&[f32]>) -> Result<Vec<f32>> {
        let bucket = self.partition.buckets().get(number as usize).ok_or_else(|| {
            Error::Misuse(format!("there is no bucket {number} of gradients: the ranks train different models"))
        })?;
        let world = self.partition.world();
        let add = |sums: &mut [f32], values: &[f32]| sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
        let zeros = || Cow::Owned(vec![0.0; bucket.shard_len * world]);
        let contribution = contribution.map_or_else(zeros, Cow::Borrowed);
        // The sums are locked after the collective, so that a call that clears them does not wait for other ranks.
        if self.is_replicated {
            let mut values = contribution.into_owned();
            ranks.all_reduce(&mut values)?;
            add(&mut lock(&self.sums)[bucket.padded_at..bucket.padded_at + values.len()], &values);
        } else {
            let mut shard = vec![0.0; bucket.shard_len];
            ranks.reduce_scatter(&contribution, &mut shard)?;
            add(&mut lock(&self.sums)[bucket.in_own_shards()], &shard);
        }
        Ok(Vec::new())
    }
}
