//! Threads that do jobs beside the computation, one after the other, for as long as the process lives.
//!
//! There is one per device and purpose, not one per job: CubeCL gives every thread of the system a stream and pools of
//! memory of its own, on the GPU and pinned on the host, which outlive the thread. A thread per copy would let both
//! grow with every step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use roll_core::Result;

/// The purpose of a thread. Jobs of one purpose wait for each other, those of two do not: a GPU copies in both
/// directions at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Copies from the device to the host.
    ToHost,
    /// Copies from the host to the device.
    ToDevice,
    /// Reading weights from their files, to the device.
    Weights,
}

type Job = Box<dyn FnOnce() + Send>;

struct Thread {
    device: Device,
    purpose: Purpose,
    jobs: Sender<Job>,
}

static THREADS: Mutex<Vec<Thread>> = Mutex::new(Vec::new());

/// Does `job` after those that were begun before it for this device and purpose. Its result arrives at the receiver; an
/// end of the channel instead means that it panicked. A job must not wait for another of its purpose.
pub fn begin<T: Send + 'static>(
    device: &Device,
    purpose: Purpose,
    job: impl FnOnce() -> Result<T> + Send + 'static,
) -> Receiver<Result<T>> {
    let (send, coming) = mpsc::channel();
    // Sending fails when the receiver was dropped: the result is not wanted any more.
    let job: Job = Box::new(move || send.send(job()).unwrap_or(()));
    if let Err(job) = queue(device, purpose, job) {
        job();
    }
    coming
}

/// Gives the job back where the system has no thread for it.
fn queue(device: &Device, purpose: Purpose, job: Job) -> std::result::Result<(), Job> {
    // Threads are added in one step: the list is whole also after a panic.
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(thread) = threads.iter().find(|thread| thread.purpose == purpose && thread.device == *device) {
        return thread.jobs.send(job).map_err(|refused| refused.0);
    }
    let (jobs, coming) = mpsc::channel();
    let name = match purpose {
        Purpose::ToHost => "roll-to-host",
        Purpose::ToDevice => "roll-to-device",
        Purpose::Weights => "roll-weights",
    };
    if let Err(error) = std::thread::Builder::new().name(name.into()).spawn(move || work(&coming)) {
        tracing::warn!("no thread for copies beside the computation, which now waits for them: {error}");
        return Err(job);
    }
    let sent = jobs.send(job).map_err(|refused| refused.0);
    threads.push(Thread { device: device.clone(), purpose, jobs });
    sent
}

fn work(jobs: &Receiver<Job>) {
    for job in jobs {
        // The panic's message is printed; the channel tells the one who waits that the job ended.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use roll_core::Error;

    use super::*;

    #[test]
    fn all_jobs_of_a_purpose_are_done_by_one_thread_in_order_and_others_by_another() {
        let device = crate::device("flex").unwrap();
        let here = || Ok(std::thread::current().id());
        let one: Vec<_> = (0..50).map(|_| begin(&device, Purpose::ToHost, here)).collect();
        let other = begin(&device, Purpose::ToDevice, here).recv().unwrap().unwrap();
        let one: Vec<_> = one.into_iter().map(|coming| coming.recv().unwrap().unwrap()).collect();
        assert!(one.iter().all(|id| *id == one[0] && *id != other && *id != std::thread::current().id()));
    }

    #[test]
    fn a_job_that_fails_or_panics_or_is_not_waited_for_does_not_end_the_thread() {
        let device = crate::device("flex").unwrap();
        drop(begin(&device, Purpose::Weights, || Ok(1)));
        let failed = begin::<u8>(&device, Purpose::Weights, || Err(Error::Misuse("no such file".into())));
        assert!(failed.recv().unwrap().is_err());
        let panicked = begin::<u8>(&device, Purpose::Weights, || panic!("as the test wants it"));
        assert!(panicked.recv().is_err());
        assert_eq!(begin(&device, Purpose::Weights, || Ok(2)).recv().unwrap().unwrap(), 2);
    }
}
