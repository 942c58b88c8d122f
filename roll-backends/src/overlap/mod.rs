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
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use roll_core::{Communicator, Error, Rank, Result};

use crate::sync::lock;
use thread::{Queue, QueuedRequest};

/// A kind of work that all ranks do together when any of them requests it.
pub trait Service: Send + Sync {
    /// Does the requested work with every rank. Called on all ranks with the same `operands`, whose meaning the service
    /// defines (the number of a bucket, a range of tensors). `contribution` is `None` on ranks that did not request the
    /// work. The result is used on requesting ranks only.
    fn serve(&self, ranks: &dyn Communicator, operands: [u32; 2], contribution: Option<&[f32]>) -> Result<Vec<f32>>;
}

/// The ranks of a job, with the services that they do for one another.
///
/// Each method of [`Communicator`] waits until every rank has reached the same collective. Until then, it serves the
/// requests of the ranks that have not reached it.
pub struct OverlappedRanks {
    sequencer: Arc<Sequencer>,
    queue: Arc<Queue>,
    is_overlap_on: AtomicBool,
}

/// Runs the collectives of a rank in sequence. It is shared with the background thread.
struct Sequencer {
    ranks: Arc<dyn Communicator>,
    services: Mutex<Vec<Arc<dyn Service>>>,
    /// Held by the thread of this rank whose request or collective is under way.
    exclusive: Mutex<()>,
}

/// A rank's next request: `[number of the service, operand, operand]`. Services are numbered from 1; 0 is no request.
type Request = [u32; 3];

const NO_REQUEST: Request = [0; 3];

impl OverlappedRanks {
    /// Returns the overlapped ranks over `ranks`. Calls with the same communicator return the same object, because all
    /// collectives of a rank must have one order. A single rank gets a new object per call.
    pub fn of(ranks: Arc<dyn Communicator>) -> Arc<Self> {
        static KNOWN: Mutex<Vec<Weak<OverlappedRanks>>> = Mutex::new(Vec::new());
        let mut known = lock(&KNOWN);
        known.retain(|overlapped| overlapped.strong_count() > 0);
        let is_of_ranks =
            |other: &Arc<Self>| std::ptr::addr_eq(Arc::as_ptr(&other.sequencer.ranks), Arc::as_ptr(&ranks));
        // A single rank waits for no other rank, and needs no common order with other jobs of one rank.
        if ranks.world_size() > 1
            && let Some(overlapped) = known.iter().filter_map(Weak::upgrade).find(is_of_ranks)
        {
            return overlapped;
        }
        let sequencer = Arc::new(Sequencer { ranks, services: Mutex::default(), exclusive: Mutex::default() });
        let overlapped = Arc::new(Self { sequencer, queue: Arc::default(), is_overlap_on: AtomicBool::new(true) });
        known.push(Arc::downgrade(&overlapped));
        overlapped
    }

    /// Registers a service and returns its number. Must be called in the same order on every rank.
    pub fn register(&self, service: Arc<dyn Service>) -> u32 {
        let mut services = lock(&self.sequencer.services);
        services.push(service);
        services.len() as u32
    }

    /// Whether work is done in the background: overlap is on and there are several ranks.
    pub fn overlaps(&self) -> bool {
        self.world_size() > 1 && self.is_overlap_on.load(Ordering::Relaxed)
    }

    /// Turns background work on or off. Results are bit-identical either way.
    pub fn set_overlap(&self, is_on: bool) {
        self.is_overlap_on.store(is_on, Ordering::Relaxed);
    }

    /// Requests work of service `number`, after the requests in the queue, and waits for the result.
    pub fn request(&self, number: u32, operands: [u32; 2], contribution: &[f32]) -> Result<Vec<f32>> {
        self.queue.wait_idle()?;
        self.sequencer.request([number, operands[0], operands[1]], contribution)
    }

    /// Queues a request behind everything queued before. If the request fails, the next call returns its error. Blocks
    /// while the queue is full.
    pub fn begin(&self, number: u32, operands: [u32; 2], contribution: Vec<f32>) -> Result<()> {
        self.enqueue(QueuedRequest {
            request: [number, operands[0], operands[1]],
            contribution,
            on_result: Box::new(|result| result.map(drop)),
        })
    }

    /// Queues a request like [`OverlappedRanks::begin`], without a contribution. The returned channel receives the
    /// result of `convert`, which runs on the background thread.
    pub fn begin_with<T: Send + 'static>(
        &self,
        number: u32,
        operands: [u32; 2],
        convert: impl FnOnce(Vec<f32>) -> Result<T> + Send + 'static,
    ) -> Result<Receiver<Result<T>>> {
        let (send, pending) = mpsc::channel();
        // Sending fails if the receiver was dropped: the result is no longer needed.
        let on_result = move |result: Result<Vec<f32>>| {
            let _ = send.send(result.and_then(convert));
            Ok(())
        };
        let request = [number, operands[0], operands[1]];
        self.enqueue(QueuedRequest { request, contribution: Vec::new(), on_result: Box::new(on_result) })?;
        Ok(pending)
    }

    fn enqueue(&self, queued: QueuedRequest) -> Result<()> {
        if self.overlaps() {
            return self.queue.push(&self.sequencer, queued);
        }
        self.queue.wait_idle()?;
        queued.run(&self.sequencer)
    }

    /// Serves the other ranks until all ranks have called this or another collective.
    pub fn settle(&self) -> Result<()> {
        self.when_settled(|_| Ok(()))
    }

    /// Runs a collective once all ranks have reached it.
    fn when_settled<T>(&self, collective: impl FnOnce(&dyn Communicator) -> Result<T>) -> Result<T> {
        self.queue.wait_idle()?;
        let sequencer = self.sequencer.as_ref();
        let _exclusive = lock(&sequencer.exclusive);
        if sequencer.ranks.world_size() > 1 {
            let no_contribution = None;
            loop {
                match sequencer.agree_on_next(NO_REQUEST)? {
                    // No rank has a request: all have reached the collective.
                    NO_REQUEST => break,
                    request => drop(sequencer.perform(request, no_contribution)?),
                }
            }
        }
        collective(sequencer.ranks.as_ref())
    }
}

impl Drop for OverlappedRanks {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl Sequencer {
    /// Does the work that the ranks request, until this rank's `request` is done, and returns its result.
    fn request(&self, request: Request, contribution: &[f32]) -> Result<Vec<f32>> {
        let _exclusive = lock(&self.exclusive);
        if self.ranks.world_size() == 1 {
            return self.perform(request, Some(contribution));
        }
        loop {
            let next = self.agree_on_next(request)?;
            let is_own = next == request;
            let result = self.perform(next, is_own.then_some(contribution))?;
            if is_own {
                return Ok(result);
            }
        }
    }

    /// Exchanges requests with all ranks and returns the work that all of them do next: the request of the lowest rank
    /// that has one.
    fn agree_on_next(&self, own_request: Request) -> Result<Request> {
        let mut all = vec![0f32; own_request.len() * self.ranks.world_size()];
        self.ranks.all_gather(&own_request.map(f32::from_bits), &mut all)?;
        let requests = all.as_chunks::<3>().0.iter().map(|request| request.map(f32::to_bits));
        Ok(requests.into_iter().find(|request| *request != NO_REQUEST).unwrap_or(NO_REQUEST))
    }

    /// Does the work of a request with all ranks.
    fn perform(&self, [number, operand_0, operand_1]: Request, contribution: Option<&[f32]>) -> Result<Vec<f32>> {
        // Services are numbered from 1. A number of 0 becomes an index that no service has.
        let service = lock(&self.services).get((number as usize).wrapping_sub(1)).cloned();
        let service = service.ok_or_else(|| {
            Error::Misuse(format!(
                "another rank asks for service {number}, which this rank does not have: do all ranks run the same \
                 version and configuration?"
            ))
        })?;
        service.serve(self.ranks.as_ref(), [operand_0, operand_1], contribution)
    }
}

impl Communicator for OverlappedRanks {
    fn rank(&self) -> Rank {
        self.sequencer.ranks.rank()
    }
    fn world_size(&self) -> usize {
        self.sequencer.ranks.world_size()
    }
    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        self.when_settled(|ranks| ranks.all_reduce(values))
    }
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.when_settled(|ranks| ranks.reduce_scatter(values, out))
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        self.when_settled(|ranks| ranks.all_gather(part, out))
    }
    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        self.when_settled(|ranks| ranks.broadcast(values, root))
    }
    fn barrier(&self) -> Result<()> {
        self.when_settled(|ranks| ranks.barrier())
    }
    fn set_timeout(&self, timeout: Duration) {
        self.sequencer.ranks.set_timeout(timeout);
    }
    fn fail(&self, reason: &str) {
        self.sequencer.ranks.fail(reason);
    }
    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>> {
        self.when_settled(|ranks| ranks.split(color))
    }
    fn all_to_all(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.when_settled(|ranks| ranks.all_to_all(values, out))
    }
}

#[cfg(test)]
mod tests {
    use roll_core::{SingleRank, ThreadRanks};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A service that sums the contributions by their first operand.
    #[derive(Default)]
    struct Sums(Mutex<[f32; 4]>);

    impl Service for Sums {
        fn serve(
            &self,
            ranks: &dyn Communicator,
            operands: [u32; 2],
            contribution: Option<&[f32]>,
        ) -> Result<Vec<f32>> {
            let mut value = [contribution.map_or(0.0, |own| own[0])];
            ranks.all_reduce(&mut value)?;
            self.0.lock().unwrap()[operands[0] as usize] += value[0];
            Ok(value.to_vec())
        }
    }

    #[test]
    fn ranks_may_request_different_work_any_number_of_times() {
        let requested: [&[u32]; 4] = [&[0, 1, 2], &[], &[2, 2, 2, 0], &[1]];
        let results = ThreadRanks::run(4, LONG, |ranks| {
            let rank = ranks.rank().0;
            let (ranks, sums) = (OverlappedRanks::of(ranks.clone()), Arc::new(Sums::default()));
            let number = ranks.register(sums.clone());
            for name in requested[rank] {
                ranks.request(number, [*name, 0], &[1.0])?;
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
    fn ranks_that_request_the_same_work_share_one_collective() {
        for result in ThreadRanks::run(3, LONG, |ranks| {
            let (ranks, sums) = (OverlappedRanks::of(ranks), Arc::new(Sums::default()));
            let number = ranks.register(sums);
            ranks.request(number, [1, 0], &[2.0])
        }) {
            assert_eq!(result.unwrap(), [6.0]);
        }
    }

    #[test]
    fn overlapped_ranks_are_shared_per_communicator_except_for_a_single_rank() {
        for ranks in ThreadRanks::group(2, LONG) {
            let ranks: Arc<dyn Communicator> = Arc::new(ranks);
            let overlapped = OverlappedRanks::of(ranks.clone());
            assert!(Arc::ptr_eq(&overlapped, &OverlappedRanks::of(ranks)));
        }
        let alone: Arc<dyn Communicator> = Arc::new(SingleRank);
        assert!(!Arc::ptr_eq(&OverlappedRanks::of(alone.clone()), &OverlappedRanks::of(alone)));
    }
}
