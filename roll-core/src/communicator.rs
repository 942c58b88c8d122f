//! Collectives over the ranks of a job.

use crate::Result;

/// Position of a process in the job, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub usize);

/// Collectives on host memory. Every rank calls the same ones in the same order with the same lengths.
pub trait Communicator: Send + Sync {
    /// This process.
    fn rank(&self) -> Rank;
    /// Number of processes.
    fn world_size(&self) -> usize;
    /// Sums `values` over ranks, in place.
    fn all_reduce(&self, values: &mut [f32]) -> Result<()>;
    /// Sums over ranks and leaves each rank its own equal part: `values.len() == world_size * out.len()`.
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()>;
    /// Joins every rank's `part`: `out.len() == world_size * part.len()`.
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()>;
    /// Sends rank `root`'s values to all.
    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()>;
    /// Waits for all ranks.
    fn barrier(&self) -> Result<()>;
}

/// One process alone.
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
        out.copy_from_slice(values);
        Ok(())
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
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
