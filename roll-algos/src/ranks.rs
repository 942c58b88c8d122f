//! How ranks share the work of a step.

use std::ops::Range;

use roll_core::{Communicator, Result, communicator};

/// The positions, of `count` in a row, that this rank works on.
pub(crate) fn share(ranks: &dyn Communicator, count: usize) -> Range<usize> {
    let (rank, world) = (ranks.rank().0, ranks.world_size());
    rank * count / world..(rank + 1) * count / world
}

/// The values of all ranks, one rank after another, bit by bit: JSON has no NaN.
pub(crate) fn join_bits(ranks: &dyn Communicator, own: Vec<f64>) -> Result<Vec<f64>> {
    if ranks.world_size() == 1 {
        return Ok(own);
    }
    let own: Vec<u64> = own.into_iter().map(f64::to_bits).collect();
    Ok(communicator::join(ranks, &own)?.into_iter().flatten().map(f64::from_bits).collect())
}
