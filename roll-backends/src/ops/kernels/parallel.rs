//! When work is worth sharing out among threads.
//!
//! Whoever calls an operator is no thread of rayon's pool. Each parallel loop then waits until a thread of the pool wakes,
//! and afterwards until the caller has woken: tens of microseconds, as long as a small operator takes. So a short loop
//! stays with its caller, and an operator of several loops enters the pool once.

/// Multiply-adds that a task has at least: some 35 microseconds, about as long as it takes to wake a thread.
const WORTH: usize = 1 << 20;
/// Multiply-adds in the time of an element that is read, computed with and written.
pub const ELEMENT: usize = 32;

/// Items that a task of a parallel loop takes at least (`with_min_len`), if each takes `work` multiply-adds.
pub fn least(work: usize) -> usize {
    (WORTH / work.max(1)).max(1)
}

/// The result of `f`, which runs in the pool if its `work`, in multiply-adds, is enough for two tasks. It must wait for
/// nothing but its own loops: a thread of the pool that waits for another one may wait forever.
pub fn within<T: Send>(work: usize, f: impl FnOnce() -> T + Send) -> T {
    match work < 2 * WORTH {
        true => f(),
        false => rayon::scope(|_| f()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_work_stays_with_its_caller_and_long_work_goes_to_the_pool() {
        let inside = |work| within(work, || rayon::current_thread_index().is_some());
        assert!(!inside(0) && !inside(2 * WORTH - 1));
        assert!(inside(2 * WORTH) && inside(usize::MAX));
    }

    #[test]
    fn tasks_are_worth_waking_a_thread() {
        assert_eq!([0, 1, WORTH / 4, WORTH, usize::MAX].map(least), [WORTH, WORTH, 4, 1, 1]);
    }
}
