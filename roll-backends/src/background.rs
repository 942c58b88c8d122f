//! Background threads: one per device and purpose, each of which runs its jobs in order until the process ends.
//!
//! A thread per job would leak memory: CubeCL allocates a stream and memory pools (on the GPU and pinned on the host)
//! for every operating-system thread, and they outlive the thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, SendError, Sender};

use burn_tensor::Device;
use roll_core::Result;

use crate::sync::lock;

/// The purpose of a thread's jobs. Jobs of one purpose run one after the other; jobs of different purposes run at the
/// same time, because a GPU copies in both directions at once.
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
    let (send, pending) = mpsc::channel();
    // Sending fails if the receiver was dropped: the result is no longer needed.
    let job: Job = Box::new(move || send.send(job()).unwrap_or(()));
    if let Err(job) = queue(device, purpose, job) {
        // Without a thread, the job runs here.
        job();
    }
    pending
}

/// Queues a job for the thread of `purpose`. Returns the job if the operating system cannot start a thread for it.
fn queue(device: &Device, purpose: Purpose, job: Job) -> std::result::Result<(), Job> {
    let mut threads = lock(&THREADS);
    if let Some(thread) = threads.iter().find(|thread| thread.purpose == purpose && thread.device == *device) {
        return thread.jobs.send(job).map_err(|SendError(job)| job);
    }
    let (jobs, pending) = mpsc::channel();
    let name = match purpose {
        Purpose::ToHost => "roll-to-host",
        Purpose::ToDevice => "roll-to-device",
        Purpose::Weights => "roll-weights",
    };
    if let Err(error) = std::thread::Builder::new().name(name.into()).spawn(move || work(&pending)) {
        tracing::warn!("no thread can be started for copies, and the computation now waits for them: {error}");
        return Err(job);
    }
    let sent = jobs.send(job).map_err(|SendError(job)| job);
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
    fn each_purpose_has_one_thread() {
        let device = crate::device("flex").unwrap();
        let here = || Ok(std::thread::current().id());
        let one: Vec<_> = (0..50).map(|_| begin(&device, Purpose::ToHost, here)).collect();
        let other = begin(&device, Purpose::ToDevice, here).recv().unwrap().unwrap();
        let one: Vec<_> = one.into_iter().map(|pending| pending.recv().unwrap().unwrap()).collect();
        assert!(one.iter().all(|id| *id == one[0] && *id != other && *id != std::thread::current().id()));
    }

    #[test]
    fn threads_survive_failed_and_abandoned_jobs() {
        let device = crate::device("flex").unwrap();
        drop(begin(&device, Purpose::Weights, || Ok(1)));
        let failed = begin::<u8>(&device, Purpose::Weights, || Err(Error::Misuse("no such file".into())));
        assert!(failed.recv().unwrap().is_err());
        let panicked = begin::<u8>(&device, Purpose::Weights, || panic!("a panic of the test"));
        assert!(panicked.recv().is_err());
        assert_eq!(begin(&device, Purpose::Weights, || Ok(2)).recv().unwrap().unwrap(), 2);
    }
}
