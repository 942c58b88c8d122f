//! The partition of the flat layout into buckets, and of each bucket into one shard per rank: who owns which elements.
//!
//! ```text
//! flat layout      | bucket 0           | bucket 1         |
//! padded buckets   | rank 0  | rank 1 . | rank 0 | rank 1 .|      (. is padding)
//! shards of rank 0 | rank 0  | rank 0 |                           (of bucket 0, of bucket 1)
//! ```

use std::ops::Range;

use roll_core::ParameterSpec;

/// Parameters that are reduced, updated and all-gathered together. Each rank owns one of `world` equal shards; zeros
/// after the last parameter make the shards equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Indices of the bucket's parameters.
    pub specs: Range<usize>,
    /// Start of the bucket in the flat layout.
    pub flat_at: usize,
    /// Number of elements, without padding.
    pub len: usize,
    /// Number of elements of a shard.
    pub shard_len: usize,
    /// Start of the bucket in the concatenation of all padded buckets.
    pub padded_at: usize,
    /// Start of a rank's shard of this bucket in the concatenation of all shards of that rank.
    pub shard_at: usize,
}

/// The flat layout, divided into buckets of whole tensors, and each bucket into one shard per rank.
///
/// Shards are formed per bucket, not from the whole vector, so that a bucket can be reduced as soon as its gradients
/// are complete, and all ranks always have equal work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    buckets: Vec<Bucket>,
    world: usize,
}

impl Partition {
    /// Divides `specs` into buckets of at most `size` elements; a larger tensor is a bucket of its own.
    pub fn new(specs: &[ParameterSpec], size: usize, world: usize) -> Self {
        let mut partition = Self { buckets: Vec::new(), world };
        let (mut first, mut len) = (0, 0);
        for (i, spec) in specs.iter().enumerate() {
            if i > first && len + spec.len() > size {
                partition.push(first..i, len);
                (first, len) = (i, 0);
            }
            len += spec.len();
        }
        if first < specs.len() {
            partition.push(first..specs.len(), len);
        }
        partition
    }

    fn push(&mut self, specs: Range<usize>, len: usize) {
        let flat_at = self.buckets.last().map_or(0, |b| b.flat_at + b.len);
        let shard_len = len.div_ceil(self.world);
        let (padded_at, shard_at) = (self.padded_len(), self.shards_len());
        self.buckets.push(Bucket { specs, flat_at, len, shard_len, padded_at, shard_at });
    }

    /// The buckets, in the order of their parameters.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Number of elements of all padded buckets.
    pub fn padded_len(&self) -> usize {
        self.shards_len() * self.world
    }

    /// Number of elements of all shards of a rank.
    pub fn shards_len(&self) -> usize {
        self.buckets.last().map_or(0, |b| b.shard_at + b.shard_len)
    }
}

impl Bucket {
    /// The range of the shard of `rank` in the padded bucket.
    pub fn shard_of(&self, rank: usize) -> Range<usize> {
        rank * self.shard_len..(rank + 1) * self.shard_len
    }

    /// The range of the shard of `rank` in the concatenation of all padded buckets.
    pub fn padded_shard_of(&self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.shard_of(rank);
        self.padded_at + start..self.padded_at + end
    }

    /// The range of a rank's shard of this bucket in the concatenation of all shards of that rank.
    pub fn in_own_shards(&self) -> Range<usize> {
        self.shard_at..self.shard_at + self.shard_len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(lengths: &[usize]) -> Vec<ParameterSpec> {
        lengths.iter().map(|n| ParameterSpec { name: format!("p{n}"), shape: vec![*n] }).collect()
    }

    #[test]
    fn buckets_partition_the_parameters() {
        let specs = specs(&[5, 1, 100, 3, 3, 3, 0, 7]);
        for (size, world) in [(1, 1), (8, 2), (8, 3), (1000, 4), (6, 7)] {
            let partition = Partition::new(&specs, size, world);
            let mut next = 0;
            for bucket in partition.buckets() {
                assert_eq!(bucket.specs.start, next);
                next = bucket.specs.end;
                let len: usize = specs[bucket.specs.clone()].iter().map(ParameterSpec::len).sum();
                assert_eq!(len, bucket.len);
                let before: usize = specs[..bucket.specs.start].iter().map(ParameterSpec::len).sum();
                assert_eq!(before, bucket.flat_at);
                assert!(len <= size || bucket.specs.len() == 1);
                assert!(bucket.shard_len * world >= len && bucket.shard_len * world < len + world);
            }
            assert_eq!(next, specs.len());
            assert!(partition.padded_len() < 122 + world * partition.buckets().len());
        }
    }

    #[test]
    fn an_empty_model_has_no_buckets() {
        assert_eq!(Partition::new(&[], 8, 2).padded_len(), 0);
    }
}
