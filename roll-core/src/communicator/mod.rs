//! Collectives over the ranks of a job.
//!
//! - [`SingleRank`]: a job of one process.
//! - [`FirstRank`]: rank 0 of a job whose other ranks do not exist, for checks and plans.
//! - [`ThreadRanks`]: ranks that are threads of one process, for tests and for jobs on one machine.
//! - Ranks over TCP and NCCL are in `roll-backends`.
//!
//! Components receive their ranks in a [`crate::BuildContext`].

mod error;
mod threads;

pub use error::RanksError;
pub use threads::ThreadRanks;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Position of a process in the job, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub usize);

/// Collectives on host memory. Every rank makes the same calls in the same order with the same lengths.
///
/// Sums are taken in the order of the ranks, element by element: `((r0 + r1) + r2) + ...`. So a sum has the same bits
/// whichever collective computed it, however the values were split, and at every run. Values that are only moved
/// keep their bits, even if the bits represent no number.
///
/// A call ends with an error when another rank failed or did not come in time. After such an error, the ranks no longer
/// make the same calls: the job is over, and every later call fails too.
pub trait Communicator: Send + Sync {
    /// This process.
    fn rank(&self) -> Rank;
    /// Number of processes.
    fn world_size(&self) -> usize;
    /// Sums `values` over ranks, in place.
    fn all_reduce(&self, values: &mut [f32]) -> Result<()>;
    /// Sums `values` over ranks. Rank `i` receives part `i` of the sum in `out`; parts are equal:
    /// `values.len() == world_size * out.len()`.
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()>;
    /// Joins the `part`s of all ranks, in the order of the ranks: `out.len() == world_size * part.len()`.
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()>;
    /// Copies the `values` of rank `root` to all ranks.
    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()>;
    /// Waits for all ranks.
    fn barrier(&self) -> Result<()>;

    /// Sets how long to wait for another rank before the job counts as lost.
    fn set_timeout(&self, _timeout: Duration) {}

    /// Reports to the other ranks that this one failed, and why: collectives that they wait for end with that error.
    /// Call it on the way out, once.
    fn fail(&self, _reason: &str) {}

    /// Fails if another rank reported a failure or was lost. Does not wait for other ranks. A transport that learns of
    /// failures only in collectives returns `Ok`.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Divides the ranks into groups, as MPI's `MPI_Comm_split` does: the ranks that pass the same `color` become a job
    /// of their own, in their order. All ranks must call it. Fails if the transport has no groups.
    fn split(&self, _color: usize) -> Result<Arc<dyn Communicator>> {
        let ranks = self.world_size();
        Err(Error::Unsupported(format!("these {ranks} ranks cannot be divided into groups over this transport")))
    }

    /// All-to-all: sends part `i` of `values` to rank `i`, and receives part `i` of `out` from it. Parts are equal, one
    /// per rank. This default, for transports without all-to-all, gathers all values of all ranks.
    fn all_to_all(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        let (ranks, own_rank) = (self.world_size(), self.rank().0);
        let part_len = check_parts(values, out, ranks)?;
        let mut all = vec![0f32; ranks * values.len()];
        self.all_gather(values, &mut all)?;
        for (sender, part) in out.chunks_exact_mut(part_len.max(1)).enumerate() {
            // Part `own_rank` of the values of rank `sender`.
            part.copy_from_slice(&all[sender * values.len() + own_rank * part_len..][..part_len]);
        }
        Ok(())
    }
}

impl fmt::Debug for dyn Communicator + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank().0, self.world_size())
    }
}

impl dyn Communicator + '_ {
    /// Gathers the bytes of all ranks, in the order of the ranks. Lengths may differ between ranks.
    pub fn all_gather_bytes(&self, own_bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let ranks = self.world_size();
        if ranks == 1 {
            return Ok(vec![own_bytes.to_vec()]);
        }
        // Lengths and bytes travel as the bits of f32 values, which are moved and never computed with: the length
        // first, as two values per rank, and then the bytes, four per value, padded to the length of the longest rank.
        let own_length = own_bytes.len() as u64;
        let mut length_words = vec![0f32; 2 * ranks];
        self.all_gather(&to_words(&own_length.to_le_bytes(), 2), &mut length_words)?;
        let length = |words: &[f32]| u64::from(words[0].to_bits()) | u64::from(words[1].to_bits()) << 32;
        let lengths: Vec<usize> = length_words.chunks_exact(2).map(|words| length(words) as usize).collect();
        let words_per_rank = lengths.iter().copied().max().unwrap_or(0).div_ceil(WORD_BYTES);
        let mut all = vec![0f32; words_per_rank * ranks];
        self.all_gather(&to_words(own_bytes, words_per_rank), &mut all)?;
        if words_per_rank == 0 {
            return Ok(vec![Vec::new(); ranks]);
        }
        let bytes_of_rank = |(length, words): (&usize, &[f32])| {
            words.iter().flat_map(|word| word.to_bits().to_le_bytes()).take(*length).collect()
        };
        Ok(lengths.iter().zip(all.chunks_exact(words_per_rank)).map(bytes_of_rank).collect())
    }

    /// Gathers one value of every rank, in the order of the ranks, bit for bit.
    pub fn all_gather_f64(&self, value: f64) -> Result<Vec<f64>> {
        let joined = self.all_gather_bytes(&value.to_le_bytes())?;
        Ok(joined.iter().filter_map(|bytes| Some(f64::from_le_bytes(*bytes.first_chunk()?))).collect())
    }
}

/// Bytes of an f32 value, as which bytes travel.
const WORD_BYTES: usize = size_of::<f32>();

/// Packs `bytes` into `count` words, padded with zeros. The words are the bits of f32 values.
fn to_words(bytes: &[u8], count: usize) -> Vec<f32> {
    let mut words = vec![0f32; count];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks(WORD_BYTES)) {
        let mut padded = [0; WORD_BYTES];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = f32::from_bits(u32::from_le_bytes(padded));
    }
    words
}

/// Gathers a value of every rank, in the order of the ranks. Values travel as JSON, which has neither NaN nor infinity:
/// pass floats as their bits (`to_bits`).
pub fn join<T: Serialize + DeserializeOwned>(ranks: &dyn Communicator, own: &T) -> Result<Vec<T>> {
    let json_error = |e: serde_json::Error| Error::failed("passing a value between ranks")(e);
    let own_json = serde_json::to_vec(own).map_err(json_error)?;
    ranks.all_gather_bytes(&own_json)?.iter().map(|bytes| serde_json::from_slice(bytes).map_err(json_error)).collect()
}

/// Writes the sum of `parts`, one per rank in the order of the ranks, to `out`, as [`Communicator`] promises. All
/// slices have one length.
pub fn sum_in_order<'a>(out: &mut [f32], parts: impl IntoIterator<Item = &'a [f32]>) {
    let mut parts = parts.into_iter();
    if let Some(first) = parts.next() {
        out.copy_from_slice(first);
    }
    for part in parts {
        out.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
    }
}

/// Returns the length of a part of an all-to-all. Fails unless `values` and `out` consist of `ranks` equal parts.
pub fn check_parts(values: &[f32], out: &[f32], ranks: usize) -> Result<usize> {
    let part = values.len() / ranks.max(1);
    check_lengths("all_to_all", values.len(), part, ranks)?;
    check_lengths("all_to_all", out.len(), part, ranks)?;
    Ok(part)
}

/// The message of a panic, if it has one.
pub fn panic_message(panic: &(dyn Any + Send)) -> Option<&str> {
    panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str))
}

/// Fails unless the longer buffer of the collective `what`, which has `whole` values, consists of one part of `part`
/// values per rank.
pub fn check_lengths(what: &'static str, whole: usize, part: usize, ranks: usize) -> Result<()> {
    if part.checked_mul(ranks) == Some(whole) {
        Ok(())
    } else {
        Err(RanksError::Length { what: what.into(), whole, part, ranks }.into())
    }
}

/// The only rank of a job of one process.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleRank;

impl Communicator for SingleRank {
    fn rank(&self) -> Rank {
        Rank(0)
    }
    fn world_size(&self) -> usize {
        1
    }
    fn all_reduce(&self, _values: &mut [f32]) -> Result<()> {
        Ok(())
    }
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("reduce_scatter", values.len(), out.len(), 1)?;
        out.copy_from_slice(values);
        Ok(())
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("all_gather", out.len(), part.len(), 1)?;
        out.copy_from_slice(part);
        Ok(())
    }
    fn broadcast(&self, _values: &mut [f32], _root: Rank) -> Result<()> {
        Ok(())
    }
    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}

/// Rank 0 of a job of this many ranks. The other ranks do not exist: `roll check` opens with this type what rank 0 of
/// a run would open. Collectives return what they would if every rank had passed the values of rank 0.
#[derive(Clone, Copy, Debug)]
pub struct FirstRank(pub usize);

impl Communicator for FirstRank {
    fn rank(&self) -> Rank {
        Rank(0)
    }
    fn world_size(&self) -> usize {
        self.0
    }
    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        let values_of_each = values.to_vec();
        sum_in_order(values, std::iter::repeat_n(&*values_of_each, self.0));
        Ok(())
    }
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("reduce_scatter", values.len(), out.len(), self.0)?;
        sum_in_order(out, std::iter::repeat_n(&values[..out.len()], self.0));
        Ok(())
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("all_gather", out.len(), part.len(), self.0)?;
        out.chunks_exact_mut(part.len().max(1)).for_each(|copy| copy.copy_from_slice(part));
        Ok(())
    }
    fn broadcast(&self, _values: &mut [f32], _root: Rank) -> Result<()> {
        Ok(())
    }
    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}
