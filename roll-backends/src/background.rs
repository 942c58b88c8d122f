//! Background threads: one per device and purpose, each of which runs its jobs in order until the process ends.
//!
//! A thread per job would leak memory: CubeCL allocates a stream and memory pools (on the GPU and pinned on the host)
//! for every operating-system thread, and they outlive the thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use roll_core::Result;

/// What a thread does. Jobs of one purpose run one after the other; jobs of different purposes run at the same time,
/// because a GPU copies in both directions at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Copies from the device to the host.
    ToHost,
    /// Copies from the host to the device.
    ToDevice,
    /// Reads weights from their files and copies them to the device.
    Weights,
}

type Job = Box<dyn FnOnce() + Send>;

struct Thread {
    device: Device,
    purpose: Purpose,
    jobs: Sender<Job>,
}

static THREADS: Mutex<Vec<Thread>> = Mutex::new(Vec::new());

/// Queues `job` behind earlier jobs for this device and purpose. The result arrives at the returned receiver; a closed
/// channel means that the job panicked. A job must not wait for another job of the same purpose, which would be a
/// deadlock.
pub fn begin<T: Send + 'static>(
    device: &Device,
    purpose: Purpose,
    job: impl FnOnce() -> Result<T> + Send + 'static,
) -> Receiver<Result<T>> {
    let (send, coming) = mpsc::channel();
    // Sending fails if the receiver was dropped: the result is no longer needed.
    let job: Job = Box::new(move || send.send(job()).unwrap_or(()));
    if let Err(job) = queue(device, purpose, job) {
        job();
    }
    coming
}

/// Returns the job if the operating system cannot start a thread for it.
fn queue(device: &Device, purpose: Purpose, job: Job) -> std::result::Result<(), Job> {
    // A panic cannot leave the list half-changed: threads are added in one step.
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
        // The panic hook prints the message; the closed channel notifies the receiver.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

#[cfg(test)]
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
        let panicked = begin::<u8>(&device, Purpose::Weights, || panic!("a panic of the test"));
        assert!(panicked.recv().is_err());
        assert_eq!(begin(&device, Purpose::Weights, || Ok(2)).recv().unwrap().unwrap(), 2);
    }
}
