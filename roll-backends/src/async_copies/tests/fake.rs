//! A fake GPU that executes queued work as late, as early and in as unusual an order as its streams and events allow.

#![allow(clippy::unwrap_used)]

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::{Runtime, RuntimeError, Stream};

/// Size of each tensor in bytes.
pub(super) const SIZE: usize = 16;

/// How much queued work is executed while the host goes on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Schedule {
    /// None, until the host waits.
    Late,
    /// All executable work of one stream.
    Eager(Stream),
    /// A random amount of random streams.
    Random(u64),
}

impl Schedule {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let eager = STREAMS.into_iter().map(Self::Eager);
        std::iter::once(Self::Late).chain(eager).chain((1..200).map(Self::Random))
    }
}

const STREAMS: [Stream; 3] = [Stream::Compute, Stream::ToHost, Stream::ToDevice];

/// Calls that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailingCalls {
    None,
    /// One call, by its index.
    One(usize),
    /// The call with this index and all later ones.
    From(usize),
}

enum Work {
    Record(usize),
    Wait(usize),
    Copy {
        to: usize,
        from: usize,
        bytes: usize,
    },
    /// A kernel that fills a tensor.
    Fill {
        at: usize,
        value: u8,
    },
    /// A kernel that checks that a tensor holds one value.
    Expect {
        at: usize,
        value: u8,
    },
}

pub(super) struct Fake {
    state: Mutex<FakeState>,
    schedule: Schedule,
    failing: FailingCalls,
    /// A pair of streams whose ordering is dropped: the first does not wait for the second.
    pub(super) missing_wait: Option<[Stream; 2]>,
}

#[derive(Default)]
struct FakeState {
    queues: [VecDeque<Work>; 3],
    /// The stream of each event.
    events: Vec<Stream>,
    reached: HashSet<usize>,
    pinned: HashSet<usize>,
    /// Free memory of tensors. The last one freed is reused first, as in libtorch.
    free: Vec<usize>,
    calls: usize,
    seed: u64,
    faults: Vec<String>,
}

/// The memory of a tensor. When dropped, it is reused at once.
pub(super) struct Memory {
    fake: Arc<Fake>,
    pub(super) at: usize,
}

/// The fake is shared with the test.
pub(super) struct FakeRuntime(pub(super) Arc<Fake>);

impl Fake {
    pub(super) fn new(schedule: Schedule, failing: FailingCalls) -> Arc<Self> {
        let seed = if let Schedule::Random(seed) = schedule { seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) } else { 0 };
        let state = Mutex::new(FakeState { seed, ..FakeState::default() });
        Arc::new(Self { state, schedule, failing, missing_wait: None })
    }

    pub(super) fn without_wait(self: Arc<Self>, pair: [Stream; 2]) -> Arc<Self> {
        let Ok(fake) = Arc::try_unwrap(self) else { panic!("it is not shared yet") };
        Arc::new(Self { missing_wait: Some(pair), ..fake })
    }

    pub(super) fn memory(self: &Arc<Self>) -> Memory {
        let free = self.lock().free.pop();
        Memory { fake: self.clone(), at: free.unwrap_or_else(|| leaked(SIZE)) }
    }

    pub(super) fn fill(&self, memory: &Memory, value: u8) {
        self.lock().push(Stream::Compute, Work::Fill { at: memory.at, value });
        self.progress();
    }

    pub(super) fn expect(&self, memory: &Memory, value: u8) {
        self.lock().push(Stream::Compute, Work::Expect { at: memory.at, value });
        self.progress();
    }

    /// Executes all queued work; returns the faults and the number of calls so far.
    pub(super) fn finish(&self) -> (Vec<String>, usize) {
        let mut state = self.lock();
        while STREAMS.into_iter().any(|stream| state.advance(stream)) {}
        if state.queues.iter().any(|queue| !queue.is_empty()) {
            state.faults.push("streams wait for each other".into());
        }
        (std::mem::take(&mut state.faults), state.calls)
    }

    /// Number of pinned buffers.
    pub(super) fn pinned(&self) -> usize {
        self.lock().pinned.len()
    }

    pub(super) fn progress(&self) {
        let mut state = self.lock();
        match self.schedule {
            Schedule::Late => {}
            Schedule::Eager(stream) => while state.advance(stream) {},
            Schedule::Random(_) => {
                for _ in 0..state.draw() % 4 {
                    let stream = STREAMS[state.draw() % 3];
                    state.advance(stream);
                }
            }
        }
    }

    fn call(&self, call: &'static str) -> Result<MutexGuard<'_, FakeState>, RuntimeError> {
        self.progress();
        let mut state = self.lock();
        let number = state.calls;
        state.calls += 1;
        match self.failing {
            FailingCalls::One(n) if n == number => Err(RuntimeError { call, reason: "refused".into() }),
            FailingCalls::From(n) if n <= number => Err(RuntimeError { call, reason: "refused".into() }),
            _ => Ok(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap()
    }
}

impl Memory {
    pub(super) fn bytes(&self) -> Vec<u8> {
        read(self.at, SIZE)
    }
}

impl FakeState {
    fn push(&mut self, stream: Stream, work: Work) {
        self.queues[stream as usize].push_back(work);
    }

    fn draw(&mut self) -> usize {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) as usize
    }

    /// Executes the next work of a stream; false if the queue is empty or waits.
    fn advance(&mut self, stream: Stream) -> bool {
        let queue = &mut self.queues[stream as usize];
        if let Some(Work::Wait(event)) = queue.front()
            && !self.reached.contains(event)
        {
            return false;
        }
        match queue.pop_front() {
            None => return false,
            Some(Work::Wait(_)) => {}
            Some(Work::Record(event)) => {
                self.reached.insert(event);
            }
            Some(Work::Copy { to, from, bytes }) => {
                let host = if stream == Stream::ToHost { to } else { from };
                match self.pinned.contains(&host) {
                    true => write(to, &read(from, bytes)),
                    false => self.faults.push(format!("{stream:?}: a copy of memory that is not pinned")),
                }
            }
            Some(Work::Fill { at, value }) => write(at, &[value; SIZE]),
            Some(Work::Expect { at, value }) => {
                let found = read(at, SIZE);
                if found != [value; SIZE] {
                    self.faults.push(format!("expected {value}, found {found:?}"));
                }
            }
        }
        true
    }

    /// Executes the work that precedes an event, and no more.
    fn synchronize_event(&mut self, event: usize) {
        let stream = self.events[event];
        while !self.reached.contains(&event) {
            let waits = match self.queues[stream as usize].front() {
                Some(Work::Wait(other)) if !self.reached.contains(other) => Some(*other),
                _ => None,
            };
            match waits {
                Some(other) => self.synchronize_event(other),
                None => assert!(self.advance(stream), "the event is queued"),
            }
        }
    }
}

impl Runtime for FakeRuntime {
    type Event = usize;

    fn record_event(&self, stream: Stream) -> Result<usize, RuntimeError> {
        let mut state = self.0.call("record")?;
        let event = state.events.len();
        state.events.push(stream);
        state.push(stream, Work::Record(event));
        Ok(event)
    }

    fn stream_wait_event(&self, stream: Stream, event: &usize) -> Result<(), RuntimeError> {
        let mut state = self.0.call("wait")?;
        if self.0.missing_wait != Some([stream, state.events[*event]]) {
            state.push(stream, Work::Wait(*event));
        }
        Ok(())
    }

    unsafe fn copy(&self, stream: Stream, to: usize, from: usize, bytes: usize) -> Result<(), RuntimeError> {
        self.0.call("copy")?.push(stream, Work::Copy { to, from, bytes });
        Ok(())
    }

    fn synchronize_event(&self, event: &usize) -> Result<(), RuntimeError> {
        self.0.call("reach")?.synchronize_event(*event);
        Ok(())
    }

    fn synchronize_stream(&self, stream: Stream) -> Result<(), RuntimeError> {
        let mut state = self.0.call("drain")?;
        let event = state.events.len();
        state.events.push(stream);
        state.push(stream, Work::Record(event));
        state.synchronize_event(event);
        Ok(())
    }

    fn pin(&self, bytes: usize) -> Result<usize, RuntimeError> {
        let at = leaked(bytes);
        self.0.call("pin")?.pinned.insert(at);
        Ok(at)
    }

    unsafe fn unpin(&self, at: usize, bytes: usize) {
        write(at, &vec![0xDD; bytes]);
        assert!(self.0.lock().pinned.remove(&at));
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.fake.lock().free.push(self.at);
    }
}

/// Leaked memory: faults are then found, and are not undefined behaviour.
fn leaked(bytes: usize) -> usize {
    Box::leak(vec![0xCC_u8; bytes].into_boxed_slice()).as_mut_ptr().expose_provenance()
}

fn read(at: usize, bytes: usize) -> Vec<u8> {
    // SAFETY: all addresses belong to leaked memory of at least that size, used by one thread.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(at), bytes) }.to_vec()
}

fn write(at: usize, bytes: &[u8]) {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(at), bytes.len()) }
        .copy_from_slice(bytes);
}
