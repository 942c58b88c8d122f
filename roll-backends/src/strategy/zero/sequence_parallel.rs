//! Sequence parallelism: groups of ranks that work on one sample.
//!
//! ```text
//!                     tokens of a pass
//! samples   group 0   rank 0   rank 1
//!           group 1   rank 2   rank 3
//! ```
//!
//! A token group shards the tokens of its sample; its ranks have the same inputs, noise and scores. The samples of a
//! step are distributed over the groups: rank `i` of every group belongs to the same set of *data-parallel ranks*.
//! Gradients are summed over all ranks. The sum over a group is the gradient of its sample, and the sum over the groups
//! is the gradient of the step.

use std::sync::Arc;
use std::time::Duration;

use roll_core::{Communicator, Error, Rank, Result, SingleRank, StrategyRanks};

use crate::overlap::OverlappedRanks;

/// The data-parallel ranks of a rank. Before a collective among them, a rank waits until all ranks of the job have
/// reached a collective. While it waits, it answers the other ranks' requests ([`OverlappedRanks::settle`]).
struct DataParallelRanks {
    all: Arc<OverlappedRanks>,
    /// The data-parallel ranks themselves, as a job of their own.
    members: Arc<dyn Communicator>,
}

/// Creates token groups of `size` ranks. Must be called by all ranks. Fails if groups of that size are impossible.
pub(super) fn strategy_ranks(all: &Arc<OverlappedRanks>, size: usize, stage: u8) -> Result<StrategyRanks> {
    let (rank, world) = (all.rank().0, all.world_size());
    let invalid = |problem: String| Err(Error::config("strategy.sequence_parallel_size", problem));
    let ranks_of = |token_group: Arc<dyn Communicator>, members: Arc<dyn Communicator>| {
        let data = Arc::new(DataParallelRanks { all: all.clone(), members });
        Ok(StrategyRanks { all: all.clone(), data, tokens: Some(token_group) })
    };
    if size == 1 {
        return Ok(StrategyRanks::new(all.clone()));
    }
    if size == 0 || !world.is_multiple_of(size) {
        return invalid(format!("expected a number that divides the {world} ranks of the job, found {size}"));
    }
    if size == world {
        // The only token group is the whole job.
        return ranks_of(all.clone(), Arc::new(SingleRank));
    }
    if stage > 2 {
        // A rank that waits for its token group would not serve the weights that other groups request.
        return invalid(format!(
            "at `strategy.stage: 3` all ranks work on one sample: expected 1 or {world}, found {size}"
        ));
    }
    let ranks: &dyn Communicator = all.as_ref();
    let (group, position_in_group) = (rank / size, rank % size);
    let split = || Ok::<_, Error>((ranks.split(group)?, ranks.split(position_in_group)?));
    match split() {
        Ok((token_group, members)) => ranks_of(token_group, members),
        // The transport has no groups.
        Err(Error::Unsupported(reason)) => invalid(format!("expected 1 or {world}, found {size}: {reason}")),
        Err(error) => Err(error),
    }
}

impl DataParallelRanks {
    /// Waits until all ranks of the job have reached their collective.
    fn settled(&self) -> Result<&dyn Communicator> {
        self.all.settle()?;
        Ok(self.members.as_ref())
    }
}

impl Communicator for DataParallelRanks {
    fn rank(&self) -> Rank {
        self.members.rank()
    }
    fn world_size(&self) -> usize {
        self.members.world_size()
    }
    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        self.settled()?.all_reduce(values)
    }
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.settled()?.reduce_scatter(values, out)
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        self.settled()?.all_gather(part, out)
    }
    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        self.settled()?.broadcast(values, root)
    }
    fn barrier(&self) -> Result<()> {
        self.settled()?.barrier()
    }
    fn set_timeout(&self, timeout: Duration) {
        self.members.set_timeout(timeout);
    }
    fn fail(&self, reason: &str) {
        self.all.fail(reason);
    }
}

#[cfg(test)]
mod tests {
    use roll_core::{Strategy, ThreadRanks};

    use crate::strategy::{Zero, ZeroOptions};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn zero(size: usize, stage: u8, ranks: Arc<dyn Communicator>) -> Result<Zero> {
        Zero::new(ZeroOptions { sequence_parallel_size: size, stage, ..ZeroOptions::default() }, ranks)
    }

    #[test]
    fn neighbouring_ranks_share_samples() {
        for (size, world) in [(2, 4), (4, 4), (2, 2), (2, 6)] {
            let results = ThreadRanks::run(world, LONG, |ranks| {
                let own = ranks.rank().0;
                let strategy = zero(size, 2, ranks)?;
                let StrategyRanks { all, data, tokens } = strategy.ranks().clone();
                let tokens = tokens.unwrap();
                assert_eq!((tokens.rank().0, tokens.world_size()), (own % size, size));
                assert_eq!((data.rank().0, data.world_size()), (own / size, world / size));
                assert_eq!(all.world_size(), world);
                let mut members = vec![0.0; size];
                tokens.all_gather(&[own as f32], &mut members)?;
                assert!(members.iter().enumerate().all(|(i, m)| *m == (own / size * size + i) as f32));
                let mut sum = [own as f32];
                data.all_reduce(&mut sum)?;
                assert_eq!(sum[0], (0..world / size).map(|group| (group * size + own % size) as f32).sum::<f32>());
                Ok(())
            });
            results.into_iter().for_each(Result::unwrap);
        }
    }

    #[test]
    fn rejects_sizes_that_do_not_divide_the_job() {
        for (size, stage, world, part) in
            [(3, 2, 4, "divides the 4 ranks"), (0, 2, 2, "sequence_parallel_size"), (2, 3, 4, "expected 1 or 4")]
        {
            for result in ThreadRanks::run(world, LONG, |ranks| zero(size, stage, ranks).map(drop)) {
                let message = result.unwrap_err().to_string();
                assert!(message.contains("strategy.sequence_parallel_size") && message.contains(part), "{message}");
            }
        }
        assert!(zero(2, 2, Arc::new(SingleRank)).is_err());
    }
}
