//! Ranks that are threads of one process. They exchange values through memory that they share: every rank deposits its
//! values, and the last one wakes the others, which then read the deposits of all.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::{Communicator, Rank, RanksError, check_lengths, check_parts, join, panic_message, sum_in_order};
use crate::{Error, Fault, Result, threads};

/// One of several ranks that are threads of this process: for tests, and for jobs of one machine.
pub struct ThreadRanks {
    rank: Rank,
    timeout: Mutex<Duration>,
    shared: Arc<Shared>,
    /// Number of calls of [`Communicator::split`] so far, which is the same on all ranks.
    splits: AtomicU64,
}

/// The memory that the ranks of a job, or of a group, share.
struct Shared {
    size: usize,
    state: Mutex<SharedState>,
    changed: Condvar,
}

struct SharedState {
    /// The deposit of each rank for the collective under way; `None` until the rank has called it.
    deposits: Vec<Option<Deposit>>,
    /// Number of completed collectives.
    completed: u64,
    /// All deposits of the last completed collective. The deposits of earlier collectives are not needed: a rank
    /// deposits for a collective only after it has read the result of the previous one.
    collected: Arc<Vec<Deposit>>,
    /// The error of all further collectives.
    failed: Option<RanksError>,
    /// Whether each rank has ended.
    ended: Vec<bool>,
    /// Groups of these ranks, by the number of the split and by color.
    groups: BTreeMap<(u64, usize), Weak<Shared>>,
}

/// The contribution of a rank to a collective.
struct Deposit {
    /// The call in words, which must be the same on all ranks: "all_reduce of 8 values".
    call: String,
    values: Vec<f32>,
}

impl ThreadRanks {
    /// The ranks of a job of `size`. A rank that waits for another one longer than `timeout` gets an error.
    pub fn group(size: usize, timeout: Duration) -> Vec<Self> {
        let shared = Shared::new(size);
        (0..size).map(|rank| Self::of(rank, timeout, shared.clone())).collect()
    }

    fn of(rank: usize, timeout: Duration, shared: Arc<Shared>) -> Self {
        Self { rank: Rank(rank), timeout: Mutex::new(timeout), shared, splits: AtomicU64::new(0) }
    }

    /// Runs `f` on a thread for each of `size` ranks, and returns the results in the order of the ranks. A rank that
    /// returns an error or panics fails the others. An interrupt does not fail them, because all ranks agreed on it.
    pub fn run<T: Send>(
        size: usize,
        timeout: Duration,
        f: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        let f = &f;
        std::thread::scope(|scope| {
            let group = Self::group(size, timeout);
            let start = |ranks: ThreadRanks| {
                let (name, ranks) = (format!("rank {}", ranks.rank.0), Arc::new(ranks));
                let ranks_of_thread = Arc::clone(&ranks);
                let started = threads::spawn_scoped(scope, &name, move || run_rank(ranks_of_thread, f));
                // The ranks that have started would otherwise wait for this one.
                started.inspect_err(|error| ranks.fail(&error.to_string()))
            };
            let started: Vec<_> = group.into_iter().map(start).collect();
            // `run_rank` catches the panics of `f`: this one happened outside of `f`.
            let panicked = |_| Err(Error::Misuse("the thread of a rank panicked".into()));
            let results = started.into_iter().map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(panicked),
                Err(error) => Err(Error::failed("a rank could not be started")(error)),
            });
            results.collect()
        })
    }

    /// Deposits `values` for the collective `call`, waits until all ranks have deposited theirs, and returns all
    /// deposits in the order of the ranks.
    fn deposit_and_wait(&self, call: String, values: Vec<f32>) -> Result<Arc<Vec<Deposit>>> {
        let (start, timeout) = (Instant::now(), *self.timeout.lock().unwrap_or_else(PoisonError::into_inner));
        let mut state = self.shared.lock();
        state.check()?;
        let completed_before = state.completed;
        state.deposits[self.rank.0] = Some(Deposit { call: call.clone(), values });
        let all_have_come = state.absent().next().is_none();
        if all_have_come {
            state.complete_collective();
            self.shared.changed.notify_all();
        }
        loop {
            state.check()?;
            if state.completed > completed_before {
                return Ok(state.collected.clone());
            }
            let ended = state.absent().find(|rank| state.ended[*rank]);
            if let Some(rank) = ended {
                return Err(self.shared.fail(state, RanksError::Ended { rank, what: call }));
            }
            let Some(time_left) = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                let absent = state.absent().collect();
                return Err(self.shared.fail(state, RanksError::Absent { absent, what: call, waited: timeout }));
            };
            state = self.shared.changed.wait_timeout(state, time_left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Runs `f` as the rank `ranks` of a job. An error or a panic of `f` fails the other ranks, except for an interrupt, on
/// which all ranks have agreed.
fn run_rank<T>(ranks: Arc<ThreadRanks>, f: impl Fn(Arc<dyn Communicator>) -> Result<T>) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(|| f(ranks.clone())));
    let result = result.unwrap_or_else(|panic| {
        let message = panic_message(panic.as_ref()).unwrap_or_default().to_string();
        Err(Error::failed(format!("rank {} panicked", ranks.rank().0))(message))
    });
    if let Err(error) = &result
        && error.fault() != Fault::Interrupt
    {
        ranks.fail(&error.chain());
    }
    result
}

impl SharedState {
    /// Ends the collective under way, for which every rank has made its deposit. Fails all further collectives if the
    /// ranks called different ones.
    fn complete_collective(&mut self) {
        let collected: Vec<Deposit> = self.deposits.iter_mut().filter_map(Option::take).collect();
        let first = collected[0].call.clone();
        if let Some((rank, deposit)) = collected.iter().enumerate().find(|(_, deposit)| deposit.call != first) {
            let other = deposit.call.clone();
            self.failed = Some(RanksError::Disagree { first, rank, other });
        }
        self.collected = Arc::new(collected);
        self.completed += 1;
    }

    /// Ranks that the collective under way waits for.
    fn absent(&self) -> impl Iterator<Item = usize> {
        self.deposits.iter().enumerate().filter(|(_, deposit)| deposit.is_none()).map(|(rank, _)| rank)
    }

    /// Fails with the error of an earlier failure, if there was one.
    fn check(&self) -> Result<()> {
        match &self.failed {
            Some(failed) => Err(failed.clone().into()),
            None => Ok(()),
        }
    }
}

impl Shared {
    fn new(size: usize) -> Arc<Self> {
        let state = SharedState {
            deposits: (0..size).map(|_| None).collect(),
            completed: 0,
            collected: Arc::default(),
            failed: None,
            ended: vec![false; size],
            groups: BTreeMap::new(),
        };
        Arc::new(Self { size, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Locks the state, even if a thread panicked while it held the lock: the state is consistent at every moment.
    fn lock(&self) -> MutexGuard<'_, SharedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes all further collectives of these ranks and of their groups fail with `error`, or with the error of an
    /// earlier failure. Returns that error.
    fn fail(&self, mut state: MutexGuard<'_, SharedState>, error: RanksError) -> Error {
        let failed = state.failed.get_or_insert(error).clone();
        let groups: Vec<_> = state.groups.values().filter_map(Weak::upgrade).collect();
        drop(state);
        self.changed.notify_all();
        // A rank in a collective of a group may wait for a rank that will never come: it failed or waits outside the
        // group.
        for group in groups {
            drop(group.fail(group.lock(), failed.clone()));
        }
        failed.into()
    }
}

impl Communicator for ThreadRanks {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.shared.size
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        let all = self.deposit_and_wait(format!("all_reduce of {} values", values.len()), values.to_vec())?;
        sum_in_order(values, all.iter().map(|d| d.values.as_slice()));
        Ok(())
    }

    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("reduce_scatter", values.len(), out.len(), self.shared.size)?;
        let all = self.deposit_and_wait(format!("reduce_scatter of {} values", values.len()), values.to_vec())?;
        let own_part = self.rank.0 * out.len()..(self.rank.0 + 1) * out.len();
        sum_in_order(out, all.iter().map(|d| &d.values[own_part.clone()]));
        Ok(())
    }

    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("all_gather", out.len(), part.len(), self.shared.size)?;
        let all = self.deposit_and_wait(format!("all_gather of {} values each", part.len()), part.to_vec())?;
        for (rank, deposit) in all.iter().enumerate() {
            out[rank * part.len()..(rank + 1) * part.len()].copy_from_slice(&deposit.values);
        }
        Ok(())
    }

    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        if root.0 >= self.shared.size {
            return Err(RanksError::NoSuchRank { rank: root.0, ranks: self.shared.size }.into());
        }
        let call = format!("broadcast of {} values from rank {}", values.len(), root.0);
        let sent = if root == self.rank { values.to_vec() } else { Vec::new() };
        let all = self.deposit_and_wait(call, sent)?;
        values.copy_from_slice(&all[root.0].values);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.deposit_and_wait("a barrier".into(), Vec::new()).map(drop)
    }

    fn set_timeout(&self, timeout: Duration) {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
    }

    fn fail(&self, reason: &str) {
        let failed = RanksError::Failed { rank: self.rank.0, reason: reason.into() };
        let _ = self.shared.fail(self.shared.lock(), failed); // an earlier failure is kept
    }

    fn check(&self) -> Result<()> {
        self.shared.lock().check()
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>> {
        let colors: Vec<usize> = join(self, &color)?;
        let split_number = self.splits.fetch_add(1, Ordering::Relaxed);
        let rank_in_group = colors[..self.rank.0].iter().filter(|other| **other == color).count();
        let group_size = colors.iter().filter(|other| **other == color).count();
        let mut state = self.shared.lock();
        // The first rank of a group to come here creates its shared memory; the others find it.
        let shared = match state.groups.get(&(split_number, color)).and_then(Weak::upgrade) {
            Some(shared) => shared,
            None => {
                let shared = Shared::new(group_size);
                state.groups.insert((split_number, color), Arc::downgrade(&shared));
                shared
            }
        };
        drop(state);
        let timeout = *self.timeout.lock().unwrap_or_else(PoisonError::into_inner);
        let group = Self::of(rank_in_group, timeout, shared);
        // All ranks have found their group before one of them can end and free it.
        self.barrier()?;
        Ok(Arc::new(group))
    }

    fn all_to_all(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        let part_len = check_parts(values, out, self.shared.size)?;
        let all = self.deposit_and_wait(format!("all_to_all of {} values", values.len()), values.to_vec())?;
        for (sender, deposit) in all.iter().enumerate() {
            let part = &deposit.values[self.rank.0 * part_len..][..part_len];
            out[sender * part_len..(sender + 1) * part_len].copy_from_slice(part);
        }
        Ok(())
    }
}

impl Drop for ThreadRanks {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ended[self.rank.0] = true;
        drop(state);
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FirstRank, SingleRank};

    const LONG: Duration = Duration::from_secs(60);

    fn all<T: Send>(n: usize, f: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync) -> Vec<T> {
        ThreadRanks::run(n, LONG, f).into_iter().map(Result::unwrap).collect()
    }

    /// Ranks whose transport has no `all_to_all` of its own.
    struct Gathering(Arc<dyn Communicator>);

    impl Communicator for Gathering {
        fn rank(&self) -> Rank {
            self.0.rank()
        }
        fn world_size(&self) -> usize {
            self.0.world_size()
        }
        fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
            self.0.all_reduce(values)
        }
        fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
            self.0.reduce_scatter(values, out)
        }
        fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
            self.0.all_gather(part, out)
        }
        fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
            self.0.broadcast(values, root)
        }
        fn barrier(&self) -> Result<()> {
            self.0.barrier()
        }
    }

    #[test]
    fn a_first_rank_receives_what_ranks_of_equal_values_would_send() {
        let collectives = |ranks: Arc<dyn Communicator>| {
            let n = ranks.world_size();
            let mut sum = [0.1, -3.5];
            ranks.all_reduce(&mut sum)?;
            let mut gathered = vec![0.0; 2 * n];
            ranks.all_gather(&[0.1, -3.5], &mut gathered)?;
            let whole: Vec<f32> = (0..2 * n).map(|i| 0.1 + i as f32).collect();
            let (mut part, mut came, mut sent) = ([0.0; 2], vec![0.0; 2 * n], [7.5]);
            ranks.reduce_scatter(&whole, &mut part)?;
            ranks.all_to_all(&whole, &mut came)?;
            ranks.broadcast(&mut sent, Rank(0))?;
            ranks.barrier()?;
            let bytes = ranks.all_gather_bytes(b"equal")?;
            Ok((ranks.rank(), n, sum, gathered, part, came, sent, bytes))
        };
        for n in [1, 3, 8] {
            let threads = all(n, collectives);
            assert_eq!(collectives(Arc::new(FirstRank(n))).unwrap(), threads[0]);
        }
    }

    #[test]
    fn collectives_return_the_expected_values_on_every_rank() {
        for n in [1, 2, 4] {
            all(n, |ranks| {
                let r = ranks.rank().0 as f32;
                let sum: f32 = (0..n).map(|r| r as f32).sum();
                let mut values = [r, 1.0, -r];
                ranks.all_reduce(&mut values)?;
                assert_eq!(values, [sum, n as f32, -sum]);

                let mut gathered = vec![0.0; 2 * n];
                ranks.all_gather(&[r, r + 0.5], &mut gathered)?;
                assert!((0..n).all(|i| gathered[2 * i..][..2] == [i as f32, i as f32 + 0.5]));

                let whole: Vec<f32> = (0..2 * n).map(|i| i as f32 * (r + 1.0)).collect();
                let mut part = [0.0; 2];
                ranks.reduce_scatter(&whole, &mut part)?;
                let first = 2.0 * r * (sum + n as f32);
                assert_eq!(part, [first, first + sum + n as f32]);

                // Once by the transport's own implementation and once by gathering.
                for ranks in [ranks.clone(), Arc::new(Gathering(ranks.clone()))] {
                    let mut came = vec![0.0; 2 * n];
                    ranks.all_to_all(&whole, &mut came)?;
                    let from = |rank: usize| [2.0 * r, 2.0 * r + 1.0].map(|i| i * (rank as f32 + 1.0));
                    assert!((0..n).all(|rank| came[2 * rank..][..2] == from(rank)));
                }
                let lengths = ranks.all_to_all(&whole, &mut vec![0.0; 2 * n + 1]);
                assert!(lengths.unwrap_err().to_string().contains("all_to_all"));

                let mut values = [r; 3];
                ranks.broadcast(&mut values, Rank(n - 1))?;
                assert_eq!(values, [(n - 1) as f32; 3]);
                ranks.barrier()
            });
        }
    }

    #[test]
    fn split_groups_are_independent_and_fail_with_the_job() {
        all(4, |ranks| {
            let own = ranks.rank().0;
            for (color, members) in [(own / 2, [own / 2 * 2, own / 2 * 2 + 1]), (own % 2, [own % 2, own % 2 + 2])] {
                let group = ranks.split(color)?;
                assert_eq!((group.world_size(), members[group.rank().0]), (2, own));
                let mut gathered = [0.0; 2];
                group.all_gather(&[own as f32], &mut gathered)?;
                assert_eq!(gathered, members.map(|member| member as f32));
            }
            Ok(())
        });
        let results = ThreadRanks::run(4, LONG, |ranks| {
            let group = ranks.split(ranks.rank().0 / 2)?;
            match ranks.rank().0 {
                3 => Err(Error::Misuse("the disk is full".into())),
                _ => group.barrier().and_then(|()| ranks.barrier()),
            }
        });
        for result in results {
            let message = result.unwrap_err().to_string();
            assert!(message.contains("the disk is full") || message.contains("ended"), "{message}");
        }
        assert!((&SingleRank as &dyn Communicator).split(0).is_err());
    }

    #[test]
    fn all_reduce_and_reduce_scatter_return_the_same_bits() {
        let values = |rank: usize| -> Vec<f32> { (0..12).map(|i| 1.0 / (rank * 12 + i + 1) as f32).collect() };
        let parts = all(4, |ranks| {
            let mut whole = values(ranks.rank().0);
            let mut part = [0.0; 3];
            ranks.reduce_scatter(&whole, &mut part)?;
            ranks.all_reduce(&mut whole)?;
            assert_eq!(whole[ranks.rank().0 * 3..][..3], part);
            Ok(part)
        });
        let expected: Vec<f32> = (0..12).map(|i| values(0)[i] + values(1)[i] + values(2)[i] + values(3)[i]).collect();
        assert_eq!(parts.concat(), expected);
    }

    #[test]
    fn all_gather_bytes_preserves_every_bit() {
        all(3, |ranks| {
            let own = |rank: usize| -> Vec<u8> { (0..rank * 7).map(|i| (i * 37 + 1) as u8).rev().collect() };
            assert_eq!(ranks.all_gather_bytes(&own(ranks.rank().0))?, [own(0), own(1), own(2)]);
            assert_eq!(ranks.all_gather_bytes(&[])?, vec![Vec::<u8>::new(); 3]);
            // A signalling NaN, which arithmetic would change.
            let odd = [0x01, 0x00, 0x80, 0x7f];
            assert_eq!(ranks.all_gather_bytes(&odd)?, [odd; 3]);
            let values = ranks.all_gather_f64(0.1 + ranks.rank().0 as f64)?;
            assert_eq!(values, [0.1, 1.1, 2.1]);
            Ok(())
        });
    }

    #[test]
    fn a_failure_or_panic_fails_the_other_ranks_with_its_reason() {
        let results = ThreadRanks::run(3, LONG, |ranks| match ranks.rank().0 {
            1 => Err(Error::Misuse("the disk is full".into())),
            _ => ranks.barrier(),
        });
        for (rank, result) in results.into_iter().enumerate() {
            let message = result.unwrap_err().to_string();
            assert!(
                message.contains("the disk is full") && (rank == 1 || message.contains("rank 1 failed")),
                "{message}"
            );
        }
        let results = ThreadRanks::run(2, LONG, |ranks| match ranks.rank().0 {
            0 => panic!("index out of range"),
            _ => ranks.all_reduce(&mut [1.0]),
        });
        let message = results[1].as_ref().unwrap_err().to_string();
        assert!(message.contains("rank 0") && message.contains("index out of range"), "{message}");
    }

    #[test]
    fn errors_name_ranks_that_end_early_or_hang() {
        let results = ThreadRanks::run(3, LONG, |ranks| if ranks.rank().0 == 2 { Ok(()) } else { ranks.barrier() });
        assert!(results[2].is_ok());
        assert!(results[0].as_ref().unwrap_err().to_string().contains("rank 2 ended"));

        let (wait, hold) = std::sync::mpsc::channel::<()>();
        let (wait, hold) = (Mutex::new(Some(wait)), Mutex::new(hold));
        let results = ThreadRanks::run(3, Duration::from_millis(50), |ranks| {
            if ranks.rank().0 == 1 {
                let _ = hold.lock().unwrap().recv(); // until rank 0 gave up
                return ranks.barrier();
            }
            let waited = ranks.barrier();
            if ranks.rank().0 == 0 {
                wait.lock().unwrap().take();
            }
            waited
        });
        for result in results {
            let message = result.unwrap_err().to_string();
            assert!(message.contains("rank 1 did not come to a barrier"), "{message}");
        }
    }

    #[test]
    fn rejects_mismatched_collectives() {
        let results = ThreadRanks::run(2, LONG, |ranks| match ranks.rank().0 {
            0 => ranks.barrier(),
            _ => ranks.all_reduce(&mut [1.0; 3]),
        });
        for result in results {
            let message = result.unwrap_err().to_string();
            assert!(message.contains("a barrier") && message.contains("all_reduce of 3"), "{message}");
        }
        let results = ThreadRanks::run(2, LONG, |ranks| ranks.all_gather(&[1.0], &mut [0.0; 3]));
        assert!(results[0].as_ref().unwrap_err().to_string().contains("3 values are not 2 parts of 1"));
    }
}
