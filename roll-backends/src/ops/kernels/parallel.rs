//! Decides when work is worth distributing over threads.
//!
//! The caller of an operator is not a thread of rayon's pool. Each parallel loop therefore waits until a thread of the
//! pool wakes, and then until the caller has woken: tens of microseconds, as long as a small operator takes. A short
//! loop stays on its caller, and an operator with several loops enters the pool once.

/// Minimum number of multiply-adds of a task: about 35 microseconds, roughly the time to wake a thread.
const MIN_TASK_WORK: usize = 1 << 20;
/// Cost of reading, processing and writing an element, in multiply-adds.
pub const ELEMENT_COST: usize = 32;

/// The minimum number of items per task of a parallel loop (`with_min_len`), if each item takes `work` multiply-adds.
pub fn min_items_per_task(work: usize) -> usize {
    (MIN_TASK_WORK / work.max(1)).max(1)
}

/// Runs `operator`, in the pool if its `work` in multiply-adds is enough for two tasks. `operator` must wait for
/// nothing but its own loops: a pool thread that waits for another may wait for ever.
pub fn in_pool<T: Send>(work: usize, operator: impl FnOnce() -> T + Send) -> T {
    if work < 2 * MIN_TASK_WORK { operator() } else { rayon::scope(|_| operator()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_work_runs_in_the_pool() {
        let inside = |work| in_pool(work, || rayon::current_thread_index().is_some());
        assert!(!inside(0) && !inside(2 * MIN_TASK_WORK - 1));
        assert!(inside(2 * MIN_TASK_WORK) && inside(usize::MAX));
    }

    #[test]
    fn tasks_have_a_minimum_of_work() {
        assert_eq!(
            [0, 1, MIN_TASK_WORK / 4, MIN_TASK_WORK, usize::MAX].map(min_items_per_task),
            [MIN_TASK_WORK, MIN_TASK_WORK, 4, 1, 1]
        );
    }
}
