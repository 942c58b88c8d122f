#![allow(clippy::unwrap_used)]

mod fake;

use std::sync::Arc;

use super::{CopyStreams, D2hCopy, Destination, H2dCopy, Runtime, RuntimeError, Stream};
use crate::sync::lock;
use fake::{FailingCalls, Fake, FakeRuntime, Memory, SIZE, Schedule};

type Streams = Arc<CopyStreams<FakeRuntime>>;
type ToHost = D2hCopy<FakeRuntime, Memory>;
type ToDevice = H2dCopy<FakeRuntime, Memory>;

/// Starts the copy of a tensor that a kernel wrote to the host. Its own handle is dropped.
fn copied_to_host(fake: &Arc<Fake>, copy_streams: &Streams, value: u8) -> Result<ToHost, RuntimeError> {
    let memory = fake.memory();
    fake.fill(&memory, value);
    let at = memory.at;
    // SAFETY: no kernel writes to it while it is held.
    unsafe { copy_streams.begin_d2h(memory, at, SIZE) }
}

fn copied_back(fake: &Arc<Fake>, copy: &mut ToHost) -> Result<ToDevice, RuntimeError> {
    let memory = fake.memory();
    let at = memory.at;
    // SAFETY: the memory is not shared.
    unsafe { copy.begin_h2d(memory, at) }
}

/// Kernels that write scratch memory and check its values.
fn compute(fake: &Arc<Fake>) {
    let scratch = [fake.memory(), fake.memory()];
    scratch.iter().for_each(|memory| fake.fill(memory, 0xEE));
    scratch.iter().for_each(|memory| fake.expect(memory, 0xEE));
}

/// Two steps of a chain with offloaded segment inputs, with everything that may happen at the same time.
fn steps(fake: &Arc<Fake>, copy_streams: &Streams) -> Result<(), RuntimeError> {
    const COUNT: u8 = 4;
    for step in 0..2 {
        let mut inputs: Vec<ToHost> = Vec::new();
        for i in 0..COUNT {
            if let Some(before) = inputs.last_mut() {
                before.release()?;
            }
            inputs.push(copied_to_host(fake, copy_streams, 10 * step + i)?);
            compute(fake);
        }
        let mut prefetched = None;
        for i in (0..COUNT).rev() {
            let this = match prefetched.take() {
                Some(copy) => copy,
                None => copied_back(fake, &mut inputs.pop().unwrap())?,
            };
            let this = this.into_tensor()?;
            if let Some(mut next) = inputs.pop() {
                prefetched = Some(copied_back(fake, &mut next)?);
                drop(next);
                // Other copies take the buffers, including those of tensors in flight, and are read on the host.
                let [mut one, mut two] =
                    [copied_to_host(fake, copy_streams, 100 + i)?, copied_to_host(fake, copy_streams, 110 + i)?];
                if one.wait_for_bytes()? != [100 + i; SIZE] || two.wait_for_bytes()? != [110 + i; SIZE] {
                    return Err(RuntimeError { call: "bytes", reason: "the host finds other values".into() });
                }
            }
            compute(fake);
            fake.expect(&this, 10 * step + i);
        }
        // A tensor that is dropped without being read.
        drop(copied_to_host(fake, copy_streams, 200)?);
        compute(fake);
        let mut unwanted = copied_to_host(fake, copy_streams, 201)?;
        drop(copied_back(fake, &mut unwanted)?);
        compute(fake);
        copy_streams.reserve(SIZE, 2)?;
        // An upload through a buffer that may still be in use.
        let uploaded = Arc::new(fake.memory());
        let mut destination = Destination::new(copy_streams)?;
        compute(fake);
        // SAFETY: no kernel uses the memory before the copy has arrived.
        unsafe { destination.fill(SIZE, |bytes| bytes.fill(77), uploaded.clone(), uploaded.at)? };
        compute(fake);
        destination.arrive()?;
        fake.expect(&uploaded, 77);
        // One that is dropped on its way.
        let unwanted = Arc::new(fake.memory());
        let mut destination = Destination::new(copy_streams)?;
        // SAFETY: as above.
        unsafe { destination.fill(SIZE, |bytes| bytes.fill(78), unwanted.clone(), unwanted.at)? };
        drop(unwanted);
        drop(destination);
        compute(fake);
    }
    Ok(())
}

/// Runs the steps; returns the faults and the number of calls.
fn run(fake: &Arc<Fake>) -> (Vec<String>, usize) {
    let copy_streams = CopyStreams::new(FakeRuntime(fake.clone()), 0);
    let result = steps(fake, &copy_streams);
    // Unrelated memory must be intact whatever happened.
    compute(fake);
    drop(copy_streams);
    compute(fake);
    let (mut faults, calls) = fake.finish();
    if let Err(failed) = result
        && failed.reason != "refused"
    {
        faults.push(failed.to_string());
    }
    (faults, calls)
}

#[test]
fn tensors_round_trip_and_all_memory_is_freed_in_every_schedule() {
    for schedule in Schedule::all() {
        let fake = Fake::new(schedule, FailingCalls::None);
        assert_eq!((run(&fake).0, fake.pinned()), (vec![], 0), "{schedule:?}");
    }
}

#[test]
fn each_wait_between_streams_is_necessary() {
    use Stream::{Compute, ToDevice, ToHost};
    let needed = [
        // Rules 1, 2, both halves of 3, and 4.
        [ToHost, Compute],
        [Compute, ToHost],
        [ToDevice, Compute],
        [Compute, ToDevice],
        [ToHost, ToDevice],
    ];
    for pair in needed {
        let is_faulty = |schedule| !run(&Fake::new(schedule, FailingCalls::None).without_wait(pair)).0.is_empty();
        assert!(Schedule::all().any(is_faulty), "{pair:?}");
    }
}

#[test]
fn failed_calls_free_no_memory_that_a_copy_uses() {
    for schedule in Schedule::all().take(40) {
        let calls = run(&Fake::new(schedule, FailingCalls::None)).1;
        for failing in (0..calls).flat_map(|n| [FailingCalls::One(n), FailingCalls::From(n)]) {
            let (faults, _) = run(&Fake::new(schedule, failing));
            assert_eq!(faults, Vec::<String>::new(), "{schedule:?} {failing:?}");
        }
    }
}

#[test]
fn a_copy_waits_for_kernels_before_its_destination_and_for_none_after_it() {
    let fake = Fake::new(Schedule::Eager(Stream::ToDevice), FailingCalls::None);
    let copy_streams = CopyStreams::new(FakeRuntime(fake.clone()), 0);
    let memory = Arc::new(fake.memory());
    fake.fill(&memory, 1);
    let mut destination = Destination::new(&copy_streams).unwrap();
    compute(&fake);
    // SAFETY: no kernel uses the memory before the copy has arrived.
    unsafe { destination.fill(SIZE, |bytes| bytes.fill(2), memory.clone(), memory.at).unwrap() };
    assert_ne!(memory.bytes(), [2; SIZE], "the kernel that fills the memory has not run");
    copy_streams.runtime.synchronize_event(&destination.kernels_done).unwrap();
    fake.progress();
    assert_eq!(memory.bytes(), [2; SIZE], "later kernels have not run");
    destination.arrive().unwrap();
    fake.expect(&memory, 2);
    assert_eq!(fake.finish().0, Vec::<String>::new());
}

#[test]
fn buffers_are_reused_and_bounded_by_the_peak_use() {
    let fake = Fake::new(Schedule::Late, FailingCalls::None);
    let copy_streams = CopyStreams::new(FakeRuntime(fake.clone()), 0);
    let hold = |count: usize, bytes: usize| {
        let one = || {
            let memory = fake.memory();
            let at = memory.at;
            // SAFETY: nothing writes to it, and it has that size.
            unsafe { copy_streams.begin_d2h(memory, at, bytes) }.unwrap()
        };
        (0..count).map(|_| one()).collect::<Vec<_>>()
    };
    drop(hold(4, 8));
    assert_eq!((lock(&copy_streams.pool).sizes(), fake.pinned()), ([32, 0], 4));
    drop(hold(4, 8));
    // At most half of a buffer may stay unused.
    drop(hold(4, 4));
    assert_eq!((lock(&copy_streams.pool).sizes(), fake.pinned()), ([32, 0], 4));
    let small = hold(2, 2);
    assert_eq!((lock(&copy_streams.pool).sizes(), fake.pinned()), ([28, 4], 5));
    drop(small);
    let large = hold(1, 16);
    assert_eq!((lock(&copy_streams.pool).sizes(), fake.pinned()), ([28, 16], 4));
    drop(large);
    drop(hold(3, 16));
    assert_eq!((lock(&copy_streams.pool).sizes(), fake.pinned()), ([48, 0], 3));
}
