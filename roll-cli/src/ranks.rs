//! The processes of a job: one, or those that a launcher started.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use roll_backends::nccl::NcclRanks;
use roll_backends::tcp::TcpRanks;
use roll_core::communicator::panic_message;
use roll_core::{BuildContext, Communicator, Error, Fault, Result, SingleRank};

use crate::args::Collectives;
use crate::launch;

/// The ranks of the launcher's job, set once.
static PROCESS: OnceLock<Arc<dyn Communicator>> = OnceLock::new();

/// Set if ranks that are threads of this process use NCCL.
static THREADS_OVER_NCCL: OnceLock<()> = OnceLock::new();

/// The ranks that this process is one of: those of the launcher's job, or itself alone.
pub fn process() -> Arc<dyn Communicator> {
    PROCESS.get().cloned().unwrap_or_else(|| Arc::new(SingleRank))
}

/// How long processes wait for each other at the start.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long they wait without saying so.
const SOON: Duration = Duration::from_secs(10);

/// The job that this process is part of; `None` if it is alone.
pub struct Job(Option<TcpRanks>);

impl Job {
    /// Joins the job that a launcher started this process for, if one did.
    pub fn join(collectives: Collectives) -> Result<Self> {
        let Some(ranks) = Self::assemble()? else {
            if collectives == Collectives::Nccl {
                let _ = THREADS_OVER_NCCL.set(());
            }
            return Ok(Self(None));
        };
        let mut process = ranks.communicator();
        if collectives == Collectives::Nccl {
            let device = device_number().ok_or_else(|| {
                let problem = "`--collectives nccl`: the launcher sets no number of this process on its machine";
                Error::Unsupported(problem.into())
            });
            process = match device.and_then(|device| NcclRanks::join(process.clone(), device)) {
                Ok(process) => process,
                Err(error) => {
                    // Every rank came here with an error of its own, and none waits for another.
                    process.barrier()?;
                    ranks.leave();
                    return Err(error);
                }
            };
        }
        if PROCESS.set(process).is_err() {
            return Err(Error::Misuse("this process is part of a job already".into()));
        }
        Ok(Self(Some(ranks)))
    }

    fn assemble() -> Result<Option<TcpRanks>> {
        let Some(place) = launch::place(variable)? else { return Ok(None) };
        let (joined, waits) = mpsc::channel::<()>();
        let waiting = format!(
            "waiting up to {} s for all {} processes of the job at {}:{}; for one process, unset {}\n",
            PATIENCE.as_secs(),
            place.size,
            place.host,
            place.port,
            launch::size_variable(variable).unwrap_or_default()
        );
        std::thread::spawn(move || {
            if waits.recv_timeout(SOON) == Err(mpsc::RecvTimeoutError::Timeout) {
                // The log begins when the rank is known.
                let _ = std::io::stderr().write_all(waiting.as_bytes());
            }
        });
        let ranks = TcpRanks::join(&place, PATIENCE)?;
        drop(joined);
        Ok(Some(ranks))
    }

    /// This process among several.
    pub fn rank(&self) -> Option<usize> {
        let ranks = process();
        (ranks.world_size() > 1).then(|| ranks.rank().0)
    }

    /// Runs `f`; if it fails or panics, the other ranks receive the failure. A panic becomes an error: some
    /// GPU libraries panic when memory runs out, and the others are to know it. An interrupt is no failure: all ranks
    /// agreed on it.
    pub fn run<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let result = catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
            Err(Error::failed("panicked")(panic_message(panic.as_ref()).unwrap_or("no message").to_string()))
        });
        if let Err(error) = &result
            && self.rank().is_some()
            && error.fault() != Fault::Interrupt
        {
            process().fail(&error.chain());
        }
        result
    }

    /// Leaves the job. A job that failed ends this process, since the other ranks know why; one that is done, or was
    /// interrupted and has its checkpoint, is left by every rank in its own time.
    pub fn leave(&self, fault: Option<Fault>, mut code: u8) {
        let Some(ranks) = &self.0 else { return };
        if matches!(fault, None | Some(Fault::Interrupt)) {
            // Work that was begun ahead and that no rank wants any more.
            let done = roll_backends::overlap::OverlappedRanks::of(process()).settle();
            let Err(error) = done.and_then(|()| ranks.communicator().barrier()) else { return ranks.leave() };
            // One write: those of several ranks to one stream come between each other.
            let line = format!("{}error: {error}\n", crate::logging::prefix(self.rank()));
            let _ = std::io::stderr().write_all(line.as_bytes());
            code = 1;
        }
        ranks.leave();
        std::process::exit(code.into());
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The device of this process: of a backend with several, and no number given, that of its place on the machine.
pub fn device(backend: &str) -> String {
    device_number().map_or_else(|| backend.into(), |number| numbered(backend, number))
}

fn numbered(backend: &str, number: usize) -> String {
    match roll_backends::Backend::is_numbered_name(backend) {
        true => format!("{backend}:{number}"),
        false => backend.into(),
    }
}

/// Adapts the context of a rank that is a thread of this process: as a process of a job, it has a device of its own,
/// and NCCL if that was asked for.
pub fn adapt(mut context: BuildContext) -> Result<BuildContext> {
    if roll_train::ranks::of_thread().is_none() {
        return match THREADS_OVER_NCCL.get() {
            Some(()) => Err(Error::Unsupported("`--collectives nccl`: the run has one rank".into())),
            None => Ok(context),
        };
    }
    let number = visible_device(context.ranks.rank().0, variable("CUDA_VISIBLE_DEVICES").as_deref());
    context.backend = numbered(&context.backend, number);
    if THREADS_OVER_NCCL.get().is_some() {
        context.ranks = NcclRanks::join(context.ranks, number)?;
    }
    Ok(context)
}

/// The number of this process's device among the visible ones; `None` unless a launcher started this process.
fn device_number() -> Option<usize> {
    let local = launch::local_rank(variable)?;
    Some(visible_device(local, variable("CUDA_VISIBLE_DEVICES").as_deref()))
}

/// The device for the process of this place on its machine. A launcher may show each process its own device only, as
/// `srun --gpus-per-task=1` does: devices are counted among the visible ones.
fn visible_device(local_rank: usize, visible: Option<&str>) -> usize {
    let count = visible.map_or(0, |list| list.split(',').filter(|device| !device.trim().is_empty()).count());
    if count == 0 { local_rank } else { local_rank % count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_counted_among_the_visible_ones() {
        assert_eq!(
            [None, Some(""), Some("0,1,2,3"), Some("GPU-5a"), Some("2,3")].map(|list| visible_device(3, list)),
            [3, 3, 3, 0, 1]
        );
    }
}
