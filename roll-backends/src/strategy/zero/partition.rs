//! Which rank owns which part of the flat layout.

use std::ops::Range;

use roll_core::ParameterSpec;

/// Parameters that are reduced, updated and gathered together. Each rank owns one of `world` equal parts of it; zeros
/// behind the last parameter make the parts equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Positions of its parameters.
    pub specs: Range<usize>,
    /// Where they begin in the flat layout.
    pub flat_at: usize,
    /// Elements of its parameters.
    pub len: usize,
    /// Elements of a part.
    pub part: usize,
    /// Where it begins in a vector of all padded buckets.
    pub padded_at: usize,
    /// Where a rank's part begins in a vector of all parts of that rank.
    pub shard_at: usize,
}

/// The flat layout, cut into buckets of whole tensors, and these into a part for each rank.
///
/// Parts are cut within buckets, and not from the whole vector, so that a bucket can be reduced as soon as its own
/// gradients are there, and every rank has its share of the work at every moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    buckets: Vec<Bucket>,
    world: usize,
}

impl Partition {
    /// Buckets of at most `size` elements, except where one tensor is larger.
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
        let (padded_at, shard_at) = (self.padded(), self.shard());
        let flat_at = self.buckets.last().map_or(0, |b| b.flat_at + b.len);
        self.buckets.push(Bucket { specs, flat_at, len, part: len.div_ceil(self.world), padded_at, shard_at });
    }

    /// The buckets, in the order of their parameters.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Elements of all buckets with their padding.
    pub fn padded(&self) -> usize {
        self.shard() * self.world
    }

    /// Elements of a rank's parts.
    pub fn shard(&self) -> usize {
        self.buckets.last().map_or(0, |b| b.shard_at + b.part)
    }
}

impl Bucket {
    /// The part of `rank`, in a vector of the padded bucket.
    pub fn own(&self, rank: usize) -> Range<usize> {
        rank * self.part..(rank + 1) * self.part
    }

    /// The same in a vector of all padded buckets.
    pub fn padded_own(&self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.own(rank);
        self.padded_at + start..self.padded_at + end
    }

    /// The rank's part in a vector of its parts.
    pub fn in_shard(&self) -> Range<usize> {
        self.shard_at..self.shard_at + self.part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(lengths: &[usize]) -> Vec<ParameterSpec> {
        lengths.iter().map(|n| ParameterSpec { name: format!("p{n}"), shape: vec![*n] }).collect()
    }

    #[test]
    fn every_parameter_is_in_one_bucket_and_every_element_has_one_owner() {
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
                assert!(bucket.part * world >= len && bucket.part * world < len + world);
            }
            assert_eq!(next, specs.len());
            assert!(partition.padded() < 122 + world * partition.buckets().len());
        }
    }

    #[test]
    fn no_parameters_are_no_buckets() {
        assert_eq!(Partition::new(&[], 8, 2).padded(), 0);
    }
}
