//! Collectives that overlap with computation, even if ranks reach them at different times or not at all.
//!
//! ```text
//!                            time ->
//! rank 0   compute        | block 0  | block 1  | block 2  | pull 2    | pull 1    |           |
//!          communication  | gather 1 | gather 2 |          | gather 1  | reduce B  | reduce A  | all_reduce
//! rank 1   compute        | block 0  | block 1  | block 2  | pull 2    | pull 1    |           |
//!          communication  | gather 1 | gather 2 |          | gather 1  | reduce B  | reduce A  | all_reduce
//! rank 2   compute        | (no sample: waits in all_reduce)                                   |
//!          communication  | shard    | shard    |          | shard     | zeros     | zeros     | all_reduce
//! ```
//!
//! Sharded weights are all-gathered block by block while a network runs, and gradients are reduced bucket by bucket
//! during the backward pass ("pull"). Ranks do not do this in lockstep: above, rank 2 has one sample less, and a plain
//! collective would wait for it for ever. Each collective is therefore preceded by an exchange of twelve bytes per
//! rank, in which every rank names the work that it requests next. All ranks then do the work that the lowest
//! requesting rank names. A rank that requested other work, or none, contributes the shard that it stores, or zeros. A
//! rank that reaches a collective of the algorithm serves the other ranks until all have reached it.
//!
//! Background work ([`OverlappedRanks::begin`]) is done by one thread, in the order in which it was queued. The order
//! of a rank's requests, and so the order of every sum, does not depend on timing.

mod thread;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use roll_core::{Communicator, Error, Groups, Rank, Result};

pub use thread::Then;
use thread::{Queue, Waiting};

/// A kind of work that all ranks do together when any of them requests it.
pub trait Service: Send + Sync {
    /// Does the work that `what` names, with every rank; called on all ranks with the same `what`. `offer` is this
    /// rank's contribution if it requested the work, else `None`. The result is used on requesting ranks only.
    fn serve(&self, ranks: &dyn Communicator, what: [u32; 2], offer: Option<&[f32]>) -> Result<Vec<f32>>;
}

/// The ranks of a job, with the services that they do for one another.
///
/// As a [`Communicator`], waits until every rank has reached the same collective, and serves the requests of the ranks
/// that have not.
pub struct OverlappedRanks {
    line: Arc<Line>,
    queue: Arc<Queue>,
    overlap: AtomicBool,
}

/// The sequence of collectives of a rank; shared with the background thread.
struct Line {
    ranks: Arc<dyn Communicator>,
    services: Mutex<Vec<Arc<dyn Service>>>,
    /// Serialises the requests of a rank's threads.
    turn: Mutex<()>,
}

/// A rank's next request: a service (from 1 on) and its two operands. Service 0 means no request.
type Wish = [u32; 3];

const NOTHING: Wish = [0; 3];

impl OverlappedRanks {
    /// Returns the overlapped ranks over `ranks`. Calls with the same communicator return the same object, because all
    /// collectives of a rank must have one order. A single rank gets a new object per call.
    pub fn of(ranks: Arc<dyn Communicator>) -> Arc<Self> {
        static KNOWN: Mutex<Vec<Weak<OverlappedRanks>>> = Mutex::new(Vec::new());
        let mut known = lock(&KNOWN);
        known.retain(|overlapped| overlapped.strong_count() > 0);
        let same = |other: &Arc<Self>| std::ptr::addr_eq(Arc::as_ptr(&other.line.ranks), Arc::as_ptr(&ranks));
        // A single rank waits for no other; sharing would only mix unrelated jobs.
        if ranks.world_size() > 1
            && let Some(overlapped) = known.iter().filter_map(Weak::upgrade).find(same)
        {
            return overlapped;
        }
        let line = Arc::new(Line { ranks, services: Mutex::default(), turn: Mutex::default() });
        let overlapped = Arc::new(Self { line, queue: Arc::default(), overlap: AtomicBool::new(true) });
        known.push(Arc::downgrade(&overlapped));
        overlapped
    }

    /// Registers a service and returns its number. Must be called in the same order on every rank.
    pub fn offer(&self, service: Arc<dyn Service>) -> u32 {
        let mut services = lock(&self.line.services);
        services.push(service);
        services.len() as u32
    }

    /// Whether work is done in the background: overlap is on and there are several ranks.
    pub fn overlaps(&self) -> bool {
        self.world_size() > 1 && self.overlap.load(Ordering::Relaxed)
    }

    /// Turns background work on or off. Results are bit-identical either way.
    pub fn set_overlap(&self, overlap: bool) {
        self.overlap.store(overlap, Ordering::Relaxed);
    }

    /// Does `what` of service `number` together with the other ranks, after the requests that precede it, and waits for
    /// the result.
    pub fn ask(&self, number: u32, what: [u32; 2], offer: &[f32]) -> Result<Vec<f32>> {
        self.queue.idle()?;
        self.line.ask([number, what[0], what[1]], offer)
    }

    /// Queues the work that [`OverlappedRanks::ask`] does, behind everything queued before. `then` receives the result,
    /// on the background thread. Without `then`, an error is returned by the next call. Blocks while the queue is full.
    pub fn begin(&self, number: u32, what: [u32; 2], offer: Vec<f32>, then: Option<Then>) -> Result<()> {
        let waiting = Waiting { wish: [number, what[0], what[1]], offer, then };
        if self.overlaps() {
            return self.queue.push(&self.line, waiting);
        }
        let Waiting { wish, offer, then } = waiting;
        self.queue.idle()?;
        let result = self.line.ask(wish, &offer);
        match then {
            Some(then) => {
                then(result);
                Ok(())
            }
            None => result.map(drop),
        }
    }

    /// Serves the other ranks until no rank has a request.
    pub fn settle(&self) -> Result<()> {
        self.settled(|_| Ok(()))
    }

    /// Runs a collective once all ranks have reached it.
    fn settled<T>(&self, collective: impl FnOnce(&dyn Communicator) -> Result<T>) -> Result<T> {
        self.queue.idle()?;
        let line = self.line.as_ref();
        let _turn = lock(&line.turn);
        if line.ranks.world_size() > 1 {
            loop {
                match line.next(NOTHING)? {
                    NOTHING => break,
                    wish => drop(line.perform(wish, None)?),
                }
            }
        }
        collective(line.ranks.as_ref())
    }
}

impl Drop for OverlappedRanks {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl Line {
    fn ask(&self, wish: Wish, offer: &[f32]) -> Result<Vec<f32>> {
        let _turn = lock(&self.turn);
        if self.ranks.world_size() == 1 {
            return self.perform(wish, Some(offer));
        }
        loop {
            let next = self.next(wish)?;
            let mine = next == wish;
            let done = self.perform(next, mine.then_some(offer))?;
            if mine {
                return Ok(done);
            }
        }
    }

    /// Returns the next work of all ranks, given this rank's request.
    fn next(&self, wish: Wish) -> Result<Wish> {
        let mut all = vec![0f32; wish.len() * self.ranks.world_size()];
        self.ranks.all_gather(&wish.map(f32::from_bits), &mut all)?;
        let wishes = all.as_chunks::<3>().0.iter().map(|wish| wish.map(f32::to_bits));
        Ok(wishes.into_iter().find(|wish| *wish != NOTHING).unwrap_or(NOTHING))
    }

    fn perform(&self, [number, a, b]: Wish, offer: Option<&[f32]>) -> Result<Vec<f32>> {
        let service = lock(&self.services).get((number as usize).wrapping_sub(1)).cloned();
        let service = service.ok_or_else(|| {
            Error::Misuse(format!(
                "another rank asks for service {number}, which this rank does not have: do all ranks run the same \
                 version and configuration?"
            ))
        })?;
        service.serve(self.ranks.as_ref(), [a, b], offer)
    }
}

impl Communicator for OverlappedRanks {
    fn rank(&self) -> Rank {
        self.line.ranks.rank()
    }
    fn world_size(&self) -> usize {
        self.line.ranks.world_size()
    }
    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        self.settled(|ranks| ranks.all_reduce(values))
    }
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.settled(|ranks| ranks.reduce_scatter(values, out))
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        self.settled(|ranks| ranks.all_gather(part, out))
    }
    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        self.settled(|ranks| ranks.broadcast(values, root))
    }
    fn barrier(&self) -> Result<()> {
        self.settled(|ranks| ranks.barrier())
    }
    fn as_groups(&self) -> Option<&dyn Groups> {
        self.line.ranks.as_groups().map(|_| self as &dyn Groups)
    }
    fn set_timeout(&self, timeout: Duration) {
        self.line.ranks.set_timeout(timeout);
    }
    fn fail(&self, reason: &str) {
        self.line.ranks.fail(reason);
    }
}

impl Groups for OverlappedRanks {
    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>> {
        self.settled(|ranks| ranks.split(color))
    }
    fn all_to_all(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.settled(|ranks| ranks.all_to_all(values, out))
    }
}

/// Locks a mutex, even if it is poisoned: the data is consistent at every moment.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use roll_core::{SingleRank, ThreadRanks};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A service that sums the offers under each name.
    #[derive(Default)]
    struct Sums(Mutex<[f32; 4]>);

    impl Service for Sums {
        fn serve(&self, ranks: &dyn Communicator, what: [u32; 2], offer: Option<&[f32]>) -> Result<Vec<f32>> {
            let mut value = [offer.map_or(0.0, |offer| offer[0])];
            ranks.all_reduce(&mut value)?;
            self.0.lock().unwrap()[what[0] as usize] += value[0];
            Ok(value.to_vec())
        }
    }

    #[test]
    fn ranks_may_ask_for_different_things_any_number_of_times() {
        let asked: [&[u32]; 4] = [&[0, 1, 2], &[], &[2, 2, 2, 0], &[1]];
        let results = ThreadRanks::run(4, LONG, |ranks| {
            let rank = ranks.rank().0;
            let (ranks, sums) = (OverlappedRanks::of(ranks.clone()), Arc::new(Sums::default()));
            let number = ranks.offer(sums.clone());
            for name in asked[rank] {
                ranks.ask(number, [*name, 0], &[1.0])?;
            }
            let mut done = [1.0];
            ranks.all_reduce(&mut done)?;
            assert_eq!(done, [4.0]);
            let sums = *sums.0.lock().unwrap();
            Ok(sums)
        });
        for result in results {
            assert_eq!(result.unwrap(), [2.0, 2.0, 4.0, 0.0]);
        }
    }

    #[test]
    fn ranks_that_want_the_same_get_it_at_once() {
        for result in ThreadRanks::run(3, LONG, |ranks| {
            let (ranks, sums) = (OverlappedRanks::of(ranks), Arc::new(Sums::default()));
            let number = ranks.offer(sums);
            ranks.ask(number, [1, 0], &[2.0])
        }) {
            assert_eq!(result.unwrap(), [6.0]);
        }
    }

    #[test]
    fn a_communicator_has_one_order_of_collectives_and_one_rank_alone_its_own() {
        for ranks in ThreadRanks::group(2, LONG) {
            let ranks: Arc<dyn Communicator> = Arc::new(ranks);
            let overlapped = OverlappedRanks::of(ranks.clone());
            assert!(Arc::ptr_eq(&overlapped, &OverlappedRanks::of(ranks)));
        }
        let alone: Arc<dyn Communicator> = Arc::new(SingleRank);
        assert!(!Arc::ptr_eq(&OverlappedRanks::of(alone.clone()), &OverlappedRanks::of(alone)));
    }
}
