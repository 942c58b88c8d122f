//! The distribution of a step's work over ranks, and the exchange of numbers between ranks.

use std::ops::Range;

use roll_core::{Communicator, Result, communicator};
use serde::{Deserialize, Serialize};

/// This rank's share of `count` items: a contiguous range of positions. The shares of two ranks differ by one item at
/// most.
pub fn share(ranks: &dyn Communicator, count: usize) -> Range<usize> {
    let (rank, world) = (ranks.rank().0, ranks.world_size());
    rank * count / world..(rank + 1) * count / world
}

/// A number that ranks send to each other as its bits: JSON has no NaN.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(from = "u64", into = "u64")]
pub struct Bits(pub f64);

impl From<u64> for Bits {
    fn from(bits: u64) -> Self {
        Self(f64::from_bits(bits))
    }
}

impl From<Bits> for u64 {
    fn from(Bits(value): Bits) -> Self {
        value.to_bits()
    }
}

/// Gathers the values of all ranks on every rank, in the order of the ranks.
pub fn join_f64(ranks: &dyn Communicator, values: Vec<f64>) -> Result<Vec<f64>> {
    if ranks.world_size() == 1 {
        return Ok(values);
    }
    let bits: Vec<Bits> = values.into_iter().map(Bits).collect();
    Ok(communicator::join(ranks, &bits)?.into_iter().flatten().map(|Bits(value)| value).collect())
}
