//! Trainable values that are sharded over the ranks: each rank has a shard of every tensor in host memory.
//!
//! Every write increments a version. Gathered tensors carry it, so that values of different versions are never mixed
//! and a pass never reads other values than those of its snapshot.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use roll_core::{Communicator, Error, ParameterSpec, Result};

use crate::BackendError;
use crate::overlap::{OverlappedRanks, Service};
use crate::sync::lock;
use crate::weights::Prefetcher;

/// Maximum number of values that a read all-gathers at a time.
const MAX_GATHERED: usize = 1 << 22;

/// This rank's shard of every tensor. A segment is all-gathered when a pass needs it, and the next one is prefetched.
pub(super) struct ShardedParameters {
    ranks: Arc<OverlappedRanks>,
    /// The index of `shards` among the services that the ranks offer one another.
    service: u32,
    shards: Arc<Shards>,
    prefetcher: Prefetcher<Gathered>,
}

/// The lengths of tensors and the positions of their shards, which are the same on every rank.
struct ShardLayout {
    names: Vec<String>,
    /// Elements of each tensor.
    lengths: Vec<usize>,
    /// The start of each tensor's shard in [`ShardValues::shards`], and the end of the last one.
    starts: Vec<usize>,
    /// This rank.
    rank: usize,
    /// Number of ranks.
    world: usize,
}

/// The shards of one rank.
struct Shards {
    layout: ShardLayout,
    values: Mutex<ShardValues>,
}

struct ShardValues {
    /// This rank's shards of all tensors, concatenated.
    shards: Vec<f32>,
    /// Number of writes so far; the same on every rank.
    version: u32,
}

/// Gathered tensors.
struct Gathered {
    /// The version of the values; `None` if the ranks' shards had different versions.
    version: Option<u32>,
    /// Index and values of each tensor.
    tensors: Vec<(usize, Vec<f32>)>,
}

impl ShardedParameters {
    pub(super) fn new(
        specs: &[ParameterSpec],
        mut values: impl FnMut(&ParameterSpec) -> Result<Vec<f32>>,
        ranks: Arc<dyn Communicator>,
    ) -> Result<Self> {
        let ranks = OverlappedRanks::of(ranks);
        let (rank, world) = (ranks.rank().0, ranks.world_size());
        let lengths: Vec<usize> = specs.iter().map(ParameterSpec::len).collect();
        let (mut starts, mut end) = (vec![0], 0);
        for length in &lengths {
            end += length.div_ceil(world);
            starts.push(end);
        }
        let names = specs.iter().map(|s| s.name.clone()).collect();
        let layout = ShardLayout { names, lengths, starts, rank, world };
        let mut own_shards = vec![0.0; layout.starts[specs.len()]];
        for (index, spec) in specs.iter().enumerate() {
            let tensor = values(spec)?;
            if tensor.len() != spec.len() {
                return Err(Error::shape(&spec.name, format!("{:?}", spec.shape), &[tensor.len()]));
            }
            layout.store_shard(index, &tensor, &mut own_shards);
        }
        let values = Mutex::new(ShardValues { shards: own_shards, version: 0 });
        let shards = Arc::new(Shards { layout, values });
        let service = ranks.register(shards.clone());
        Ok(Self { ranks, service, shards, prefetcher: Prefetcher::default() })
    }

    pub(super) fn version(&self) -> u32 {
        lock(&self.shards.values).version
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<f32>() * lock(&self.shards.values).shards.len()
    }

    /// Index and values of the tensors whose names start with `prefix`, in the given version. Fails with
    /// [`BackendError::OldParameters`] if they were written since.
    pub(super) fn segment(&self, prefix: &str, version: u32) -> Result<Vec<(usize, Vec<f32>)>> {
        let prefetched = self.prefetcher.segment(prefix, self.ranks.overlaps(), |prefix| {
            let (range, shards) = (self.shards.layout.range(prefix)?, self.shards.clone());
            let operands = [range.start as u32, range.end as u32];
            self.ranks.begin_with(self.service, operands, move |all| shards.layout.assemble(range, &all))
        })?;
        if prefetched.version == Some(version) {
            return Ok(prefetched.tensors);
        }
        // The prefetched values are from before an update.
        let gathered = self.gather(self.shards.layout.range(prefix)?)?;
        // There is a version, because gathering fails if the ranks' versions differ.
        let current = gathered.version.unwrap_or(version);
        if current != version {
            return Err(BackendError::OldParameters { behind: current.wrapping_sub(version) }.into());
        }
        Ok(gathered.tensors)
    }

    /// All-gathers the tensors `which`, at most [`MAX_GATHERED`] elements at a time (or one larger tensor), and copies
    /// them to `out`, their part of the flat layout.
    pub(super) fn read(&self, which: Range<usize>, mut out: &mut [f32]) -> Result<()> {
        let mut first = which.start;
        while first < which.end {
            let mut elements = self.shards.layout.lengths[first];
            let mut end = first + 1;
            while end < which.end && elements + self.shards.layout.lengths[end] <= MAX_GATHERED {
                elements += self.shards.layout.lengths[end];
                end += 1;
            }
            for (_, tensor) in self.gather(first..end)?.tensors {
                let (head, tail) = out.split_at_mut(tensor.len());
                head.copy_from_slice(&tensor);
                out = tail;
            }
            first = end;
        }
        Ok(())
    }

    /// Stores this rank's shards of the tensors `which`, given their part of the flat layout.
    pub(super) fn write(&self, which: Range<usize>, mut values: &[f32]) {
        let mut stored = lock(&self.shards.values);
        for index in which {
            let (tensor, tail) = values.split_at(self.shards.layout.lengths[index]);
            self.shards.layout.store_shard(index, tensor, &mut stored.shards);
            values = tail;
        }
        stored.version = stored.version.wrapping_add(1);
    }

    /// All-gathers the tensors `which`. Fails if the ranks' shards have different versions.
    fn gather(&self, which: Range<usize>) -> Result<Gathered> {
        let all = self.ranks.request(self.service, [which.start as u32, which.end as u32], &[])?;
        let gathered = self.shards.layout.assemble(which, &all)?;
        match gathered.version {
            Some(_) => Ok(gathered),
            None => Err(Error::Misuse(
                "the ranks wrote their parameters a different number of times: do all of them load the same files?"
                    .into(),
            )),
        }
    }
}

impl ShardLayout {
    /// The range of tensors whose names start with `prefix`. Fails unless they are adjacent.
    fn range(&self, prefix: &str) -> Result<Range<usize>> {
        let is_in_range = |name: &String| name.starts_with(prefix);
        let start = self.names.iter().position(is_in_range).unwrap_or(0);
        let count = self.names[start..].iter().take_while(|name| is_in_range(name)).count();
        match self.names[start + count..].iter().find(|name| is_in_range(name)) {
            None => Ok(start..start + count),
            Some(name) => Err(Error::Misuse(format!(
                "parameters that are sharded over the ranks must be listed segment by segment; `{name}` is apart from \
                 the others of `{prefix}*`"
            ))),
        }
    }

    /// Copies this rank's shard of tensor `index` to its place in `own_shards`.
    fn store_shard(&self, index: usize, tensor: &[f32], own_shards: &mut [f32]) {
        let shard = &mut own_shards[self.starts[index]..self.starts[index + 1]];
        let start = (self.rank * shard.len()).min(tensor.len());
        let end = (start + shard.len()).min(tensor.len());
        shard[..end - start].copy_from_slice(&tensor[start..end]);
    }

    /// Assembles the tensors `which` from `gathered`: the shards of each rank, followed by the bits of its version.
    fn assemble(&self, which: Range<usize>, gathered: &[f32]) -> Result<Gathered> {
        let base = self.starts[which.start];
        let shards_len = self.starts[which.end] - base;
        let by_rank: Vec<&[f32]> = gathered.chunks_exact(shards_len + 1).collect();
        let version = |of_rank: &[f32]| of_rank[shards_len].to_bits();
        let is_complete = by_rank.len() == self.world;
        let Some(rank_0) = by_rank.first().filter(|_| is_complete) else {
            let (world, found) = (self.world, gathered.len());
            return Err(Error::Misuse(format!("gathering {shards_len} values of {world} ranks gave {found}")));
        };
        let is_same_version = by_rank.iter().all(|of_rank| version(of_rank) == version(rank_0));
        let tensor = |index: usize| {
            let shard = self.starts[index] - base..self.starts[index + 1] - base;
            let mut values = Vec::with_capacity(shard.len() * self.world);
            by_rank.iter().for_each(|of_rank| values.extend_from_slice(&of_rank[shard.clone()]));
            // Without the padding of the last shards.
            values.truncate(self.lengths[index]);
            (index, values)
        };
        Ok(Gathered { version: is_same_version.then(|| version(rank_0)), tensors: which.map(tensor).collect() })
    }
}

impl Service for Shards {
    /// All-gathers the tensors `first..end`: every rank's shards, followed by the bits of its version.
    fn serve(
        &self,
        ranks: &dyn Communicator,
        [first, end]: [u32; 2],
        contribution: Option<&[f32]>,
    ) -> Result<Vec<f32>> {
        let (first, end, count) = (first as usize, end as usize, self.layout.lengths.len());
        if first > end || end > count {
            return Err(Error::Misuse(format!(
                "another rank requests the parameters {first} to {end} of {count}: do all ranks train the same model?"
            )));
        }
        // Copied, so that the lock is not held while waiting for other ranks.
        let own_message = {
            let values = lock(&self.values);
            let mut message = values.shards[self.layout.starts[first]..self.layout.starts[end]].to_vec();
            message.push(f32::from_bits(values.version));
            message
        };
        let mut gathered = vec![0.0; own_message.len() * self.layout.world];
        ranks.all_gather(&own_message, &mut gathered)?;
        let is_requested_here = contribution.is_some();
        Ok(if is_requested_here { gathered } else { Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use roll_core::ThreadRanks;

    use super::*;
    use crate::Parameters;

    const LONG: Duration = Duration::from_secs(60);

    fn specs() -> Vec<ParameterSpec> {
        let spec = |name: &str, shape: &[usize]| ParameterSpec { name: name.into(), shape: shape.to_vec() };
        vec![spec("in.w", &[3, 5]), spec("b.0.w", &[7]), spec("b.0.x", &[1]), spec("b.1.w", &[4, 4]), spec("out", &[2])]
    }

    fn values(spec: &ParameterSpec, at: f32) -> Vec<f32> {
        (0..spec.len()).map(|i| at + i as f32 / 64.0 + spec.name.len() as f32).collect()
    }

    #[test]
    fn sharded_parameters_have_the_bits_of_replicated_ones_and_an_equal_part_per_rank() {
        let device = crate::device("flex").unwrap();
        for world in [1, 2, 3] {
            let results = ThreadRanks::run(world, LONG, |ranks| {
                let rank = ranks.rank().0;
                let whole = Parameters::new(specs(), specs().iter().map(|s| values(s, 0.0)).collect(), &device);
                let sharded = Parameters::sharded(specs(), |s| Ok(values(s, 0.0)), &device, ranks.clone())?;
                let all: usize = specs().iter().map(ParameterSpec::len).sum();
                assert!(sharded.bytes() >= 4 * all / world && sharded.bytes() < 4 * (all / world + specs().len()));
                for round in 0..3 {
                    let (a, b) = (whole.snapshot(), sharded.snapshot());
                    // Ranks read different segments, a different number of times.
                    for prefix in ["in.", "b.0.", "b.1.", "out", "b.0."].iter().skip(rank) {
                        let (expected, found) = (a.segment(prefix)?, b.segment(prefix)?);
                        for spec in specs().iter().filter(|s| s.name.starts_with(prefix)) {
                            let bits = |s: &crate::ParameterSegment| s.get(&spec.name).unwrap().2.clone().into_data();
                            assert_eq!(bits(&expected), bits(&found));
                        }
                        let count = specs().iter().filter(|s| s.name.starts_with(prefix)).count();
                        assert_eq!([expected.iter().count(), found.iter().count()], [count; 2]);
                    }
                    let mut read = [vec![0.0; all], vec![0.0; all]];
                    whole.read(&mut read[0])?;
                    sharded.read(&mut read[1])?;
                    assert_eq!(read[0], read[1]);
                    OverlappedRanks::of(ranks.clone()).settle()?;
                    let new: Vec<f32> = specs()[1..4].iter().flat_map(|s| values(s, round as f32)).collect();
                    whole.write_part(1..4, &new)?;
                    sharded.write_part(1..4, &new)?;
                }
                OverlappedRanks::of(ranks).settle()
            });
            results.into_iter().for_each(|result| result.unwrap());
        }
    }

    #[test]
    fn a_snapshot_from_before_an_update_is_rejected() {
        let device = crate::device("flex").unwrap();
        let results = ThreadRanks::run(2, LONG, |ranks| {
            let sharded = Parameters::sharded(specs(), |s| Ok(values(s, 0.0)), &device, ranks)?;
            let before = sharded.snapshot();
            sharded.write_part(4..5, &[1.0, 2.0])?;
            before.segment("b.0.").map(drop)
        });
        for result in results {
            let message = result.unwrap_err().to_string();
            assert!(message.contains("1 writes ago"), "{message}");
        }
    }

    #[test]
    fn a_segment_that_is_not_contiguous_is_rejected() {
        let device = crate::device("flex").unwrap();
        let mut specs = specs();
        specs.swap(0, 1);
        let ranks: Arc<dyn Communicator> = Arc::new(roll_core::SingleRank);
        let sharded = Parameters::sharded(specs, |s| Ok(values(s, 0.0)), &device, ranks).unwrap();
        let message = sharded.snapshot().segment("b.0.").err().unwrap().to_string();
        assert!(message.contains("`b.0.w` is apart") || message.contains("`b.0.x` is apart"), "{message}");
    }
}
