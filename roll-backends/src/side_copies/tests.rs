#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use super::fake::{Fake, Memory, Refuse, SIZE, Schedule, Shared};
use super::{Failed, Leaving, Lines, Returning, Stream};

type Here = Arc<Lines<Shared>>;

/// Starts the copy of a tensor that a kernel wrote to the host. Its own handle is dropped.
fn sent(fake: &Arc<Fake>, lines: &Here, value: u8) -> Result<Leaving<Shared, Memory>, Failed> {
    let memory = fake.memory();
    fake.fill(&memory, value);
    let at = memory.at;
    // SAFETY: no kernel writes to it while it is held.
    unsafe { lines.leave(memory, at, SIZE) }
}

fn returned(fake: &Arc<Fake>, leaving: &mut Leaving<Shared, Memory>) -> Result<Returning<Shared, Memory>, Failed> {
    let memory = fake.memory();
    let at = memory.at;
    // SAFETY: the memory is not shared.
    unsafe { leaving.back(memory, at) }
}

/// Kernels that write scratch memory and check its values.
fn compute(fake: &Arc<Fake>) {
    let scratch = [fake.memory(), fake.memory()];
    scratch.iter().for_each(|memory| fake.fill(memory, 0xEE));
    scratch.iter().for_each(|memory| fake.expect(memory, 0xEE));
}

/// Two steps of a chain with offloaded segment inputs, with everything that may happen at the same time.
fn steps(fake: &Arc<Fake>, lines: &Here) -> Result<(), Failed> {
    const COUNT: u8 = 4;
    for step in 0..2 {
        let mut inputs: Vec<Leaving<Shared, Memory>> = Vec::new();
        for i in 0..COUNT {
            if let Some(before) = inputs.last_mut() {
                before.release()?;
            }
            inputs.push(sent(fake, lines, 10 * step + i)?);
            compute(fake);
        }
        let mut coming = None;
        for i in (0..COUNT).rev() {
            let this = match coming.take() {
                Some(coming) => coming,
                None => returned(fake, &mut inputs.pop().unwrap())?,
            };
            let this = this.take()?;
            if let Some(mut next) = inputs.pop() {
                coming = Some(returned(fake, &mut next)?);
                drop(next);
                // Other copies take the buffers, including those of tensors in flight, and are read on the host.
                let [mut one, mut two] = [sent(fake, lines, 100 + i)?, sent(fake, lines, 110 + i)?];
                if one.bytes()? != [100 + i; SIZE] || two.bytes()? != [110 + i; SIZE] {
                    return Err(Failed { call: "bytes", reason: "the host finds other values".into() });
                }
            }
            compute(fake);
            fake.expect(&this, 10 * step + i);
        }
        // A tensor that is dropped without being read.
        drop(sent(fake, lines, 200)?);
        compute(fake);
        let mut unwanted = sent(fake, lines, 201)?;
        drop(returned(fake, &mut unwanted)?);
        compute(fake);
        lines.reserve(SIZE, 2)?;
        // An upload through a buffer that may still be in use.
        let memory = fake.memory();
        let at = memory.at;
        // SAFETY: the memory is not shared.
        let brought = unsafe { lines.bring(SIZE, |bytes| bytes.fill(77), memory, at)? };
        compute(fake);
        let brought = brought.take()?;
        fake.expect(&brought, 77);
    }
    Ok(())
}

/// Runs the steps; returns the faults and the number of calls.
fn run(fake: &Arc<Fake>) -> (Vec<String>, usize) {
    let lines = Lines::new(Shared(fake.clone()), 0);
    let result = steps(fake, &lines);
    // Unrelated memory must be intact whatever happened.
    compute(fake);
    drop(lines);
    compute(fake);
    let (mut wrong, calls) = fake.finish();
    if let Err(failed) = result
        && failed.reason != "refused"
    {
        wrong.push(failed.to_string());
    }
    (wrong, calls)
}

#[test]
fn what_returns_is_what_left_in_every_order_of_the_streams_and_all_memory_is_given_back() {
    for schedule in Schedule::all() {
        let fake = Fake::new(schedule, Refuse::None);
        assert_eq!((run(&fake).0, fake.pinned()), (vec![], 0), "{schedule:?}");
    }
}

#[test]
fn without_any_one_of_the_orders_something_goes_wrong_in_some_schedule() {
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
        let goes_wrong = |schedule| !run(&Fake::new(schedule, Refuse::None).forgetting(pair)).0.is_empty();
        assert!(Schedule::all().any(goes_wrong), "{pair:?}");
    }
}

#[test]
fn a_call_that_fails_is_an_error_and_gives_no_memory_away_that_a_copy_uses() {
    for schedule in Schedule::all().take(40) {
        let calls = run(&Fake::new(schedule, Refuse::None)).1;
        for refuse in (0..calls).flat_map(|n| [Refuse::One(n), Refuse::From(n)]) {
            let (wrong, _) = run(&Fake::new(schedule, refuse));
            assert_eq!(wrong, Vec::<String>::new(), "{schedule:?} {refuse:?}");
        }
    }
}

#[test]
fn buffers_are_used_again_and_never_take_more_than_was_in_use_at_once() {
    let fake = Fake::new(Schedule::Late, Refuse::None);
    let lines = Lines::new(Shared(fake.clone()), 0);
    let hold = |count: usize, bytes: usize| {
        let one = || {
            let memory = fake.memory();
            let at = memory.at;
            // SAFETY: nothing writes to it, and it has that size.
            unsafe { lines.leave(memory, at, bytes) }.unwrap()
        };
        (0..count).map(|_| one()).collect::<Vec<_>>()
    };
    drop(hold(4, 8));
    assert_eq!((lines.lock().sizes(), fake.pinned()), ([32, 0], 4));
    drop(hold(4, 8));
    // At most half of a buffer may stay unused.
    drop(hold(4, 4));
    assert_eq!((lines.lock().sizes(), fake.pinned()), ([32, 0], 4));
    let small = hold(2, 2);
    assert_eq!((lines.lock().sizes(), fake.pinned()), ([28, 4], 5));
    drop(small);
    let large = hold(1, 16);
    assert_eq!((lines.lock().sizes(), fake.pinned()), ([28, 16], 4));
    drop(large);
    drop(hold(3, 16));
    assert_eq!((lines.lock().sizes(), fake.pinned()), ([48, 0], 3));
}
