//! The processes of a job: one, or those that `mpirun` started.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use roll_core::communicator::panic_message;
use roll_core::{Communicator, Error, Fault, Result, SingleRank};

use crate::args::Collectives;

/// The ranks of the launcher's job, set once.
static PROCESS: OnceLock<Arc<dyn Communicator>> = OnceLock::new();

/// The ranks that this process is one of: those of the launcher's job, or itself alone.
pub fn process() -> Arc<dyn Communicator> {
    PROCESS.get().cloned().unwrap_or_else(|| Arc::new(SingleRank))
}

/// The job that this process is part of.
pub struct Job {
    #[cfg(feature = "mpi")]
    mpi: Option<Arc<roll_backends::mpi::MpiRanks>>,
}

impl Job {
    /// Joins the job that a launcher started this process for, if one did. Fails when there are several processes and
    /// this build cannot talk to the others: they would all do the same work and write the same files.
    #[cfg(feature = "mpi")]
    pub fn join(collectives: Collectives) -> Result<Self> {
        use roll_backends::mpi;
        if !mpi::is_launched() {
            return match processes(|name| std::env::var(name).ok()) {
                None => Ok(Self { mpi: None }),
                Some((variable, n)) => Err(Error::Unsupported(format!(
                    "{variable} says that {n} processes were started, but not by an MPI launcher, so they cannot reach \
                     each other: start them with `mpirun`, or with `srun --mpi=pmix`; for one process, unset {variable}"
                ))),
            };
        }
        let ranks = mpi::MpiRanks::join()?;
        let process: Arc<dyn Communicator> = match collectives {
            Collectives::Mpi => ranks.clone(),
            Collectives::Nccl => match over_nccl(ranks.clone()) {
                Ok(process) => process,
                Err(error) => {
                    // Every rank came here with an error of its own, and none waits for another.
                    ranks.finish()?;
                    return Err(error);
                }
            },
        };
        if PROCESS.set(process).is_err() {
            return Err(Error::Misuse("this process is part of a job already".into()));
        }
        Ok(Self { mpi: Some(ranks) })
    }

    /// As with the feature `mpi`.
    #[cfg(not(feature = "mpi"))]
    pub fn join(_collectives: Collectives) -> Result<Self> {
        match processes(|name| std::env::var(name).ok()) {
            None => Ok(Self {}),
            Some((variable, n)) => Err(Error::Unsupported(format!(
                "{variable} says that {n} processes were started, and this build knows one: build roll with \
                 `--features mpi`; for one process, unset {variable}"
            ))),
        }
    }

    /// This process among several.
    pub fn rank(&self) -> Option<usize> {
        let ranks = process();
        (ranks.world_size() > 1).then(|| ranks.rank().0)
    }

    /// Runs `f`; if it fails or panics, the other ranks receive the failure. A panic becomes an error: a process that
    /// unwound out of MPI would leave the others waiting, and some GPU libraries panic when memory runs out. An
    /// interrupt is no failure: all ranks agreed on it.
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

    /// Leaves the job. One that failed is ended as a whole; one that is done, or was interrupted and has its
    /// checkpoint, is left by every rank in its own time.
    pub fn leave(&self, fault: Option<Fault>, code: u8) {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            if !matches!(fault, None | Some(Fault::Interrupt)) {
                mpi.abort(code.into());
            }
            // Work that was begun ahead and that no rank wants any more.
            let done = roll_backends::overlap::OverlappedRanks::of(process()).settle();
            if let Err(error) = done.and_then(|()| mpi.finish()) {
                // One write: those of several ranks to one stream come between each other.
                let line = format!("{}error: {error}\n", crate::logging::prefix(self.rank()));
                let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
                mpi.abort(1);
            }
        }
        #[cfg(not(feature = "mpi"))]
        let _ = (fault, code);
    }
}

/// The ranks with their large collectives over NCCL, each with the device of its place on the machine.
#[cfg(feature = "nccl")]
fn over_nccl(ranks: Arc<roll_backends::mpi::MpiRanks>) -> Result<Arc<dyn Communicator>> {
    let device = device_number().ok_or_else(|| {
        Error::Unsupported("`--collectives nccl`: the launcher sets no number of this process on its machine".into())
    })?;
    Ok(roll_backends::nccl::NcclRanks::join(ranks, device)?)
}

/// As with the feature `nccl`.
#[cfg(all(feature = "mpi", not(feature = "nccl")))]
fn over_nccl(_ranks: Arc<roll_backends::mpi::MpiRanks>) -> Result<Arc<dyn Communicator>> {
    Err(Error::Unsupported("`--collectives nccl`: build roll with `--features nccl`".into()))
}

/// Number of processes that a launcher started, and the variable that says so; `None` if there is one process. Each of
/// the common launchers sets a variable of its own: Open MPI, MPICH, Slurm, and torchrun or Kubernetes' PyTorchJob.
fn processes(value: impl Fn(&str) -> Option<String>) -> Option<(&'static str, usize)> {
    const VARIABLES: [&str; 4] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"];
    let counts = VARIABLES.into_iter().filter_map(|name| Some((name, value(name)?.parse().ok()?)));
    counts.filter(|(_, count)| *count > 1).max_by_key(|(_, count)| *count)
}

/// The device of this process: of a backend with several, and no number given, that of its place on the machine.
pub fn device(backend: &str) -> String {
    #[cfg(feature = "mpi")]
    if let (true, Some(number)) = (roll_backends::Backend::is_numbered_name(backend), device_number()) {
        return format!("{backend}:{number}");
    }
    backend.into()
}

/// The number of this process's device among the visible ones; `None` unless a launcher started this process.
#[cfg(feature = "mpi")]
fn device_number() -> Option<usize> {
    let local = roll_backends::mpi::local_rank()?;
    Some(visible_device(local, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()))
}

/// The device for the process of this place on its machine. A launcher may show each process its own device only, as
/// `srun --gpus-per-task=1` does: devices are counted among the visible ones.
#[cfg(any(feature = "mpi", test))]
fn visible_device(local_rank: usize, visible: Option<&str>) -> usize {
    let count = visible.map_or(0, |list| list.split(',').filter(|device| !device.trim().is_empty()).count());
    if count == 0 { local_rank } else { local_rank % count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_every_launcher_are_counted() {
        let count = |set: &[(&str, &str)]| {
            processes(|name| set.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).into()))
        };
        assert_eq!(count(&[]), None);
        assert_eq!(count(&[("WORLD_SIZE", "1"), ("PMI_SIZE", "no number")]), None);
        for name in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"] {
            assert_eq!(count(&[(name, "4"), ("WORLD_SIZE", "1")]), Some((name, 4)));
        }
    }

    #[test]
    fn devices_are_counted_among_the_visible_ones() {
        assert_eq!(
            [None, Some(""), Some("0,1,2,3"), Some("GPU-5a"), Some("2,3")].map(|list| visible_device(3, list)),
            [3, 3, 3, 0, 1]
        );
    }
}
