//! Ranks that are threads of this process.

use std::sync::Arc;

use roll_core::{Communicator, Error, RanksError, Result, ThreadRanks};

use crate::config::RunConfig;

/// Bytes of the stack of each thread: the size of the main thread's stack on Linux.
const STACK_BYTES: usize = 8 << 20;
/// Largest number of ranks for each core without a warning. The demo has four ranks, and must not warn on one core.
const MAX_PER_CORE: usize = 4;
/// Beginning of the names of a rank's threads. The number of the rank follows.
const THREAD_PREFIX: &str = "rank ";
/// Timeout of collectives until the strategy sets its own.
const FIRST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(1800);

/// The number of ranks of this process: [`RunConfig::ranks`], or one if the process itself is one of the ranks of a
/// `job` of several processes.
pub fn of_process(config: &RunConfig, job: &dyn Communicator) -> usize {
    match job.world_size() {
        1 => config.ranks,
        _ => 1,
    }
}

/// Returns the rank that this thread works for, if [`run`] started it.
pub fn of_thread() -> Option<usize> {
    let thread = std::thread::current();
    thread.name()?.strip_prefix(THREAD_PREFIX)?.split(',').next()?.parse().ok()
}

/// Runs `f` on every rank of this process, and returns the result of rank 0. `f` receives the communicator of its rank,
/// for its [`roll_core::BuildContext`]. `job` is the communicator of this process.
///
/// If the process has one rank ([`of_process`]), `f` is called here with `job`. Otherwise each rank is a thread with an
/// equal share of the threads of rayon's pool. If one rank fails, and other ranks fail because of it, the error of the
/// first one is returned.
pub fn run<T: Send>(
    config: &RunConfig,
    job: Arc<dyn Communicator>,
    f: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
) -> Result<T> {
    let ranks = of_process(config, job.as_ref());
    if ranks <= 1 {
        return f(job);
    }
    warn_of_many(ranks);
    let threads = (rayon::current_num_threads() / ranks).max(1);
    let results = ThreadRanks::run(ranks, FIRST_TIMEOUT, |communicator| {
        let rank = communicator.rank().0;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .stack_size(STACK_BYTES)
            .thread_name(move |i| format!("{THREAD_PREFIX}{rank}, thread {i}"));
        let pool = pool.build().map_err(Error::failed("the threads of a rank cannot be started"))?;
        pool.install(|| f(communicator))
    });
    of_rank_0(results)
}

/// Logs a warning if `ranks` ranks are too many for the cores of this machine.
pub(crate) fn warn_of_many(ranks: usize) {
    let cores = rayon::current_num_threads();
    if ranks > MAX_PER_CORE * cores {
        tracing::warn!("{ranks} ranks share {cores} threads: each has a copy of the networks, and none is faster");
    }
}

/// The result of rank 0 if no rank failed. Otherwise the first error that is not about the failure of another rank,
/// since this error made the other ranks fail. Without such an error, the first error.
fn of_rank_0<T>(mut results: Vec<Result<T>>) -> Result<T> {
    let is_cause = |result: &Result<T>| result.as_ref().is_err_and(|error| RanksError::within(error).is_none());
    let cause = results.iter().position(is_cause);
    let chosen = cause.or_else(|| results.iter().position(Result::is_err)).unwrap_or(0);
    results.swap_remove(chosen)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{ResultExt, SingleRank};

    use super::*;

    fn with(ranks: usize) -> RunConfig {
        RunConfig { ranks, ..RunConfig::default() }
    }

    fn alone() -> Arc<dyn Communicator> {
        Arc::new(SingleRank)
    }

    #[test]
    fn ranks_share_the_threads_and_rank_0_returns_the_result() {
        for ranks in [1, 2, 3] {
            let all = rayon::current_num_threads();
            let [found, threads, world] = run(&with(ranks), alone(), |own| {
                assert_eq!(of_thread(), (ranks > 1).then_some(own.rank().0));
                let mut one = [1.0];
                own.all_reduce(&mut one)?;
                assert_eq!(one[0] as usize, own.world_size());
                Ok([own.rank().0, rayon::current_num_threads(), own.world_size()])
            })
            .unwrap();
            assert_eq!([found, world], [0, ranks]);
            assert_eq!(threads, (all / ranks).max(1));
        }
        assert_eq!(of_thread(), None);
    }

    #[test]
    fn ranks_of_a_job_are_not_divided_further() {
        let found = ThreadRanks::run(3, FIRST_TIMEOUT, |job| run(&with(2), job, |own| Ok(own.world_size())));
        assert!(found.into_iter().all(|world| world.unwrap() == 3));
        let found = ThreadRanks::run(3, FIRST_TIMEOUT, |job| Ok(of_process(&with(2), job.as_ref())));
        assert!(found.into_iter().all(|ranks| ranks.unwrap() == 1));
        assert_eq!(of_process(&with(2), &SingleRank), 2);
    }

    #[test]
    fn returns_the_error_of_the_rank_that_failed_first() {
        let error = run(&with(3), alone(), |own| match own.rank().0 {
            1 => Err(Error::bad_file("1.mp4", "is no video")).while_doing(|| "reading row 7".into()),
            _ => own.barrier().while_doing(|| "ending the step".into()),
        });
        let message = error.unwrap_err().chain();
        assert!(message.starts_with("reading row 7") && message.contains("1.mp4"), "{message}");
    }

    #[test]
    fn a_rank_that_panics_is_an_error() {
        let error = run(&with(2), alone(), |own| match own.rank().0 {
            1 => panic!("a hundred faces"),
            _ => own.barrier(),
        });
        let message = error.unwrap_err().chain();
        assert!(message.contains("rank 1 panicked") && message.contains("a hundred faces"), "{message}");
    }
}
