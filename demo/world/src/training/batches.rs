//! Prefetch of batches on a thread of its own while the network trains.

use std::sync::mpsc::sync_channel;

use roll_core::{Error, Result};

/// Maximal number of prefetched batches, enough to bridge a slow one.
const AHEAD: usize = 2;

/// Calls `each` with the result of `make` for steps `0..steps`, in order. `make` runs on a thread of its own. Fails
/// with the first error of either.
pub fn for_each_batch<B: Send>(
    steps: u64,
    make: impl Fn(u64) -> Result<B> + Send,
    mut each: impl FnMut(B) -> Result<()>,
) -> Result<()> {
    std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel(AHEAD);
        scope.spawn(move || {
            for step in 0..steps {
                // The receiver is gone if `each` failed.
                if sender.send(make(step)).is_err() {
                    return;
                }
            }
        });
        for _ in 0..steps {
            let made = receiver.recv().map_err(|_| Error::Misuse("the thread that makes batches panicked".into()))?;
            each(made?)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_come_in_order_and_a_failure_on_either_side_ends_the_run() {
        let mut seen = vec![];
        for_each_batch(5, Ok, |step| {
            seen.push(step);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [0, 1, 2, 3, 4]);
        let failed = |at: u64| move |step| if step == at { Err(Error::Misuse("no".into())) } else { Ok(step) };
        assert!(for_each_batch(100, failed(3), |_| Ok(())).is_err());
        assert!(for_each_batch(100, Ok, |step| failed(7)(step).map(|_| ())).is_err());
    }
}
