//! Frozen weights that are sharded over the ranks and all-gathered segment by segment.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn_tensor::{DType, Device};
use roll_core::{Communicator, Error, Result, Tensor};

use super::{Prefetcher, SegmentMemory, SegmentSizes, Storage, Weight, WeightStore, Weights};
use crate::overlap::{OverlappedRanks, Service};

/// A store in which every rank holds an equal shard of every weight in host memory. A segment is assembled when it is
/// requested, and not kept. If overlap is on ([`OverlappedRanks::overlaps`]), the next segment is prefetched in the
/// background, which takes the memory of one more segment. Ranks may request different segments, and a different number
/// of segments.
///
/// bf16 weights are stored and sent as bf16.
pub struct Sharded {
    ranks: Arc<OverlappedRanks>,
    /// The index of `shards` among the services that the ranks offer one another.
    service: u32,
    shards: Arc<Shards>,
    prefetcher: Prefetcher<(Weights, SegmentMemory)>,
    sizes: SegmentSizes,
}

/// Bytes of a word. Weights of any dtype are divided into words, which travel as f32.
const WORD_BYTES: usize = size_of::<f32>();

/// The shards of one rank.
struct Shards {
    /// The device that segments are assembled on.
    device: Device,
    /// One entry per weight, sorted by key, so that a segment is a range.
    entries: Vec<Entry>,
    /// This rank's shards of all entries, concatenated.
    words: Vec<f32>,
    /// Number of ranks.
    world: usize,
}

/// A weight of which each rank has a shard.
struct Entry {
    key: String,
    shape: Vec<usize>,
    dtype: roll_core::DType,
    /// Bytes of the whole weight.
    bytes: usize,
    /// The range of this weight's shard in [`Shards::words`], the same on every rank.
    shard: Range<usize>,
}

impl Sharded {
    /// Stores this rank's shard of each of `tensors`, in the dtypes of `storage`. The tensors must be the same on all
    /// ranks, and sorted by key. Each tensor is dropped before the next one is requested, so that a rank never holds
    /// the whole network, even if tensors are merged or decoded while they are read. Of a memory-mapped tensor that
    /// keeps its dtype, only the shard is read.
    pub fn new(
        tensors: impl IntoIterator<Item = Result<(String, Tensor)>>,
        storage: impl Into<Storage>,
        device: &Device,
        ranks: Arc<dyn Communicator>,
    ) -> Result<Self> {
        let storage = storage.into();
        let ranks = OverlappedRanks::of(ranks);
        let (rank, world) = (ranks.rank().0, ranks.world_size());
        let (mut entries, mut words) = (Vec::<Entry>::new(), Vec::new());
        for tensor in tensors {
            let (key, tensor) = tensor?;
            if entries.last().is_some_and(|last| last.key >= key) {
                return Err(Error::Misuse(format!("weights to shard are sorted by key: `{key}` comes too late")));
            }
            // In the dtype that a store without shards would hold.
            let stored = match (tensor.dtype(), storage.of(&key, tensor.dtype())) {
                // The dtype of the file.
                (roll_core::DType::Bf16, DType::BF16) | (roll_core::DType::F32, DType::F32) => tensor.clone(),
                // Other dtypes are rounded to bf16 by way of f32.
                (_, DType::BF16) => tensor.to_float(roll_core::DType::F32)?.to_float(roll_core::DType::Bf16)?,
                _ => tensor.to_float(roll_core::DType::F32)?,
            };
            let bytes = stored.as_bytes();
            let shard = shard_of_rank(bytes, rank, world);
            let first_word = words.len();
            entries.push(Entry {
                key,
                shape: tensor.shape().to_vec(),
                dtype: stored.dtype(),
                bytes: bytes.len(),
                shard: first_word..first_word + shard.len(),
            });
            words.extend(shard);
        }
        words.shrink_to_fit();
        let shards = Arc::new(Shards { device: device.clone(), entries, words, world });
        let service = ranks.register(shards.clone());
        Ok(Self { ranks, service, shards, prefetcher: Prefetcher::default(), sizes: SegmentSizes::default() })
    }

    /// Size of this rank's shards in bytes.
    pub fn bytes(&self) -> usize {
        WORD_BYTES * self.shards.words.len()
    }
}

impl WeightStore for Sharded {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let (weights, memory) = self.prefetcher.segment(prefix, self.ranks.overlaps(), |prefix| {
            let (range, shards) = (self.shards.range(prefix), self.shards.clone());
            let mut memory = self.sizes.reserve(prefix, &shards.device);
            let operands = [range.start as u32, range.end as u32];
            // Assembled by the thread that gathered it, so that a pass that uses a prefetched segment does not wait for
            // the assembly either.
            self.ranks.begin_with(self.service, operands, move |gathered| {
                Ok((shards.assemble(range, &gathered, &mut memory)?, memory))
            })
        })?;
        self.sizes.arrived(prefix, memory)?;
        Ok(weights)
    }

    fn device(&self) -> &Device {
        &self.shards.device
    }

    fn shape(&self, key: &str) -> Option<Vec<usize>> {
        let entries = &self.shards.entries;
        let at = entries.binary_search_by(|e| e.key.as_str().cmp(key)).ok()?;
        Some(entries[at].shape.clone())
    }
}

impl Shards {
    /// The range of entries whose key starts with `prefix`.
    fn range(&self, prefix: &str) -> Range<usize> {
        let start = self.entries.partition_point(|e| e.key.as_str() < prefix);
        let count = self.entries[start..].partition_point(|e| e.key.starts_with(prefix));
        start..start + count
    }

    /// Assembles the weights of a range of entries from `gathered`, the shards of all ranks (see [`Service::serve`]
    /// below).
    fn assemble(&self, range: Range<usize>, gathered: &[f32], memory: &mut SegmentMemory) -> Result<Weights> {
        let entries = &self.entries[range];
        let segment = words_of(entries);
        let mut weights = HashMap::with_capacity(entries.len());
        for entry in entries {
            let in_segment = entry.shard.start - segment.start..entry.shard.end - segment.start;
            let shards = (0..self.world).map(|rank| &gathered[rank * segment.len()..][in_segment.clone()]);
            let bytes = PaddedBytes { words: shards.flatten().copied().collect(), len: entry.bytes };
            let tensor = Tensor::from_bytes(entry.dtype, entry.shape.clone(), Arc::new(bytes))?;
            let dtype = if entry.dtype == roll_core::DType::Bf16 { DType::BF16 } else { DType::F32 };
            weights.insert(entry.key.clone(), Weight::uploaded(&tensor, dtype, &self.device, memory));
        }
        Ok(Arc::new(weights))
    }
}

/// The shard of rank `rank` of a weight. All ranks have the same number of words: the shards of the last ranks are
/// padded.
fn shard_of_rank(bytes: &[u8], rank: usize, world: usize) -> Vec<f32> {
    let shard_bytes = WORD_BYTES * bytes.len().div_ceil(WORD_BYTES * world);
    let start = (shard_bytes * rank).min(bytes.len());
    let end = (shard_bytes * (rank + 1)).min(bytes.len());
    let mut shard = bytes[start..end].to_vec();
    shard.resize(shard_bytes, 0);
    bytemuck::pod_collect_to_vec(&shard)
}

/// The range of the shards of adjacent entries in [`Shards::words`].
fn words_of(entries: &[Entry]) -> Range<usize> {
    entries.first().map_or(0, |e| e.shard.start)..entries.last().map_or(0, |e| e.shard.end)
}

impl Service for Shards {
    /// All-gathers the entries `first..end`: the shards of rank 0, then those of rank 1, and so on.
    fn serve(
        &self,
        ranks: &dyn Communicator,
        [first, end]: [u32; 2],
        contribution: Option<&[f32]>,
    ) -> Result<Vec<f32>> {
        let entries = self.entries.get(first as usize..end as usize).ok_or_else(|| {
            Error::Misuse(format!(
                "another rank requests the weights {first} to {end} of {}: do all ranks read the same files?",
                self.entries.len()
            ))
        })?;
        let own_words = &self.words[words_of(entries)];
        let mut gathered = vec![0.0; own_words.len() * self.world];
        ranks.all_gather(own_words, &mut gathered)?;
        let is_requested_here = contribution.is_some();
        Ok(if is_requested_here { gathered } else { Vec::new() })
    }
}

/// The `len` bytes of a tensor, in words that may end with padding.
struct PaddedBytes {
    words: Vec<f32>,
    len: usize,
}

impl AsRef<[u8]> for PaddedBytes {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use roll_core::{StateDict, ThreadRanks};

    use super::*;
    use crate::Resident;
    use crate::tests::CountingRanks;
    use crate::weights::Value;

    fn state() -> StateDict {
        let values = |n: usize, seed: usize| (0..n).map(|i| ((i * 7 + seed) as f32 * 0.13).sin()).collect::<Vec<f32>>();
        let mut state = StateDict::new();
        for (i, (name, shape)) in
            [("b.0.w", vec![5, 7]), ("b.0.x", vec![1]), ("b.1.w", vec![64, 3]), ("b.10.w", vec![3]), ("head", vec![9])]
                .into_iter()
                .enumerate()
        {
            let n = shape.iter().product();
            state.insert(name.into(), Tensor::new(values(n, i), shape).unwrap());
        }
        state
    }

    fn tensors(state: &StateDict) -> impl Iterator<Item = Result<(String, Tensor)>> {
        state.iter().map(|(key, tensor)| Ok((key.clone(), tensor.clone())))
    }

    /// Bytes of a tensor that counts itself while it lives.
    struct Counted(Vec<u8>, Arc<AtomicUsize>);

    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn one_tensor_at_a_time_is_held_while_weights_are_sharded() {
        let device = crate::device("flex").unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let results = ThreadRanks::run(2, Duration::from_secs(60), |ranks| {
                let live = Arc::new(AtomicUsize::new(0));
                let read = (0..5).map(|i| {
                    assert_eq!(live.fetch_add(1, Ordering::SeqCst), 0, "the last tensor is still held");
                    let bytes = Arc::new(Counted(vec![i; 24], live.clone()));
                    Ok((format!("b.{i}"), Tensor::from_bytes(roll_core::DType::F32, vec![6], bytes)?))
                });
                Sharded::new(read, dtype, &device, ranks.clone()).map(|store| store.bytes())
            });
            let size = if dtype == DType::BF16 { 8 } else { 12 };
            assert!(results.into_iter().all(|bytes| bytes.unwrap() == 5 * size));
        }
    }

    #[test]
    fn weights_that_are_not_sorted_are_refused() {
        let results = ThreadRanks::run(1, Duration::from_secs(60), |ranks| {
            let unsorted = ["b", "a"].map(|key| Ok((key.into(), Tensor::new(vec![1.0], [1])?)));
            Sharded::new(unsorted, DType::F32, &crate::device("flex")?, ranks.clone()).map(|store| store.bytes())
        });
        let error = results.into_iter().next().unwrap().unwrap_err().to_string();
        assert!(error.contains("`a` comes too late"), "{error}");
    }

    #[test]
    fn sharded_segments_have_the_bits_of_resident_ones() {
        let device = crate::device("flex").unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let resident = Resident::new(&state(), dtype, &device);
            for world in [1, 2, 3] {
                let results = ThreadRanks::run(world, Duration::from_secs(60), |ranks| {
                    let rank = ranks.rank().0;
                    let store = Sharded::new(tensors(&state()), dtype, &device, ranks.clone())?;
                    // The ranks request different segments, and rank 1 none.
                    let wanted: &[&str] = match rank {
                        0 => &["b.0.", "b.1.", "head", "none"],
                        1 => &[],
                        _ => &["head", "b.1."],
                    };
                    for prefix in wanted {
                        let (ours, theirs) = (store.segment(prefix)?, resident.segment(prefix)?);
                        assert_eq!(ours.len(), theirs.len(), "{prefix}");
                        for (key, weight) in ours.iter() {
                            let bits = |w: &Weight| match &w.value {
                                Value::Dense(value) => value.flat().clone().cast(DType::F32).into_data(),
                                _ => panic!("{key} is not dense"),
                            };
                            assert_eq!(bits(weight), bits(&theirs[key]), "{key}");
                            assert_eq!(weight.shape(), theirs[key].shape());
                        }
                    }
                    OverlappedRanks::of(ranks).settle()?;
                    assert_eq!(store.shape("b.1.w"), Some(vec![64, 3]));
                    Ok(store.bytes())
                });
                let size = if dtype == DType::BF16 { 2 } else { 4 };
                let all: usize = state().values().map(|t| t.len() * size).sum();
                for bytes in results {
                    let bytes = bytes.unwrap();
                    assert!(bytes >= all / world && bytes <= all / world + 4 * state().len(), "{bytes} of {all}");
                }
            }
        }
    }

    #[test]
    fn the_next_segment_is_prefetched() {
        const BLOCKS: usize = 6;
        const PASSES: usize = 4;
        let tensor = |i: usize| Tensor::new(vec![i as f32; 64], [64]).unwrap();
        let state: StateDict = (0..BLOCKS).map(|i| (format!("b.{i}.w"), tensor(i))).collect();
        let device = crate::device("flex").unwrap();
        for overlap in [true, false] {
            let results = ThreadRanks::run(2, Duration::from_secs(60), |ranks| {
                let ranks = CountingRanks::new(ranks);
                let overlapped = OverlappedRanks::of(ranks.clone());
                overlapped.set_overlap(overlap);
                let store = Sharded::new(tensors(&state), DType::F32, &device, ranks.clone())?;
                let mut used = 0;
                for pass in 0..PASSES {
                    for i in (0..BLOCKS).chain((0..BLOCKS).rev()) {
                        used += 1;
                        let weights = store.segment(&format!("b.{i}."))?;
                        let value = weights[&format!("b.{i}.w")].f32::<1>()?.into_data();
                        assert_eq!(value.try_into_vec::<f32>().unwrap(), vec![i as f32; 64]);
                        // Once the order is known, the next segment is fetched without a request. The time is not
                        // measured: the limit only ends a test in which it is never fetched.
                        let since = std::time::Instant::now();
                        while overlap && pass > 1 && ranks.gathered.load(Ordering::SeqCst) <= used {
                            assert!(since.elapsed() < Duration::from_secs(30), "block {i} of pass {pass}");
                            std::thread::yield_now();
                        }
                    }
                }
                overlapped.settle()?;
                Ok(ranks.gathered.load(Ordering::SeqCst))
            });
            for gathered in results {
                let (gathered, needed) = (gathered.unwrap(), PASSES * 2 * BLOCKS);
                assert!(gathered == needed || (overlap && gathered <= needed + 2), "{gathered} for {needed}");
            }
        }
    }
}
