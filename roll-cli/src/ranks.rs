//! The processes of a job, which a launcher started, and the device of each. Without a launcher this process is alone,
//! and its ranks may be threads.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use roll_backends::Backend;
use roll_backends::nccl::{NcclRanks, SMALL};
use roll_backends::tcp::{Place, TcpRanks};
use roll_core::communicator::panic_message;
use roll_core::{BuildContext, Communicator, Error, Fault, RanksError, Result, SingleRank, threads};

use crate::args::Collectives;
use crate::launch;

/// The communicator of the launcher's job: over TCP, and once [`with_collectives`] has joined NCCL, over both. `None`
/// if this process is alone.
static COMMUNICATOR: Mutex<Option<Arc<dyn Communicator>>> = Mutex::new(None);
/// The argument `--collectives`, set once.
static COLLECTIVES: OnceLock<Collectives> = OnceLock::new();

/// The communicator of the launcher's job, or that of a single rank if this process is alone.
pub fn process() -> Arc<dyn Communicator> {
    locked_communicator().clone().unwrap_or_else(|| Arc::new(SingleRank))
}

fn locked_communicator() -> MutexGuard<'static, Option<Arc<dyn Communicator>>> {
    COMMUNICATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long processes wait for each other at the start.
const JOIN_TIMEOUT: Duration = Duration::from_secs(600);
/// How long processes wait for each other before a message says so.
const MESSAGE_DELAY: Duration = Duration::from_secs(10);

/// How long NCCL may take to connect the processes.
const NCCL_TIMEOUT: Duration = Duration::from_secs(120);
/// Why a process that no launcher started has no NCCL.
const NO_LAUNCHER: &str = "`--collectives nccl` is for the processes of a launcher, and none started this one: ranks \
     that are threads (`--ranks`) exchange values in host memory; leave the option out, or start a process for each \
     GPU: torchrun --no-python --nproc-per-node N roll run ...";

/// The number of this process's NVIDIA GPU, or the reason why it has none.
type Gpu = std::result::Result<usize, String>;

/// The job that this process is part of; `None` if it is alone.
pub struct Job(Option<TcpRanks>);

impl Job {
    /// Joins the job of the launcher that started this process, at `place`. `None`: no launcher started it.
    pub fn join(place: Option<Place>, collectives: Collectives) -> Result<Self> {
        let _ = COLLECTIVES.set(collectives);
        let Some(place) = place else {
            return match collectives {
                Collectives::Nccl => Err(Error::Unsupported(NO_LAUNCHER.into())),
                Collectives::Auto | Collectives::Host => Ok(Self(None)),
            };
        };
        let ranks = Self::assemble(&place)?;
        *locked_communicator() = Some(ranks.communicator());
        Ok(Self(Some(ranks)))
    }

    /// Waits for the other processes of the job. After [`MESSAGE_DELAY`], a message says what this process waits for.
    fn assemble(place: &Place) -> Result<TcpRanks> {
        // The sender is dropped when all have joined, which ends the thread that would print the message.
        let (sender, receiver) = mpsc::channel::<()>();
        let message = format!(
            "waiting up to {} s for all {} processes of the job at {}:{}; for one process, unset {}",
            JOIN_TIMEOUT.as_secs(),
            place.size,
            place.host,
            place.port,
            launch::size_variable(variable).unwrap_or_default()
        );
        // If the thread cannot be started, only the message is missing.
        let _ = threads::spawn("a message", move || {
            if receiver.recv_timeout(MESSAGE_DELAY) == Err(mpsc::RecvTimeoutError::Timeout) {
                tracing::warn!("{message}");
            }
        });
        let ranks = TcpRanks::join(place, JOIN_TIMEOUT)?;
        drop(sender);
        Ok(ranks)
    }

    /// The rank of this process; `None` if it is alone.
    pub fn rank(&self) -> Option<usize> {
        let ranks = process();
        (ranks.world_size() > 1).then(|| ranks.rank().0)
    }

    /// Runs `f`. If it fails or panics, the other ranks receive the failure. A panic becomes an error, because some GPU
    /// libraries panic when memory runs out, and the other ranks must not wait for this one. An interrupt is not passed
    /// on, because all ranks have agreed on it.
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

    /// Leaves the job after a command that ended with `fault` and the exit code `code`.
    ///
    /// If the command is done, or was interrupted and has its checkpoint, this waits for all ranks, and returns. If it
    /// failed, the other ranks know already, so this does not wait for them and ends the process.
    pub fn leave(&self, fault: Option<Fault>, mut code: u8) {
        let Some(ranks) = &self.0 else { return };
        if matches!(fault, None | Some(Fault::Interrupt)) {
            // Ends exchanges that were begun ahead of their use.
            let settled = roll_backends::overlap::OverlappedRanks::of(process()).settle();
            let Err(error) = settled.and_then(|()| ranks.communicator().barrier()) else { return ranks.leave() };
            // One write, so that the lines of several ranks do not mix.
            let line = format!("{}error: {error}\n", crate::logging::prefix(self.rank()));
            let _ = std::io::stderr().write_all(line.as_bytes());
            code = 1;
        }
        ranks.leave();
        std::process::exit(code.into());
    }
}

/// The place that a launcher gave this process in a job; `None` if it is alone.
pub fn place() -> Result<Option<Place>> {
    launch::place(variable)
}

/// Sets the communicator of a run's context to the one that `--collectives` asks for. All processes of a job must call
/// this.
pub fn with_collectives(mut context: BuildContext) -> Result<BuildContext> {
    let ranks = context.ranks.clone();
    if ranks.world_size() == 1 {
        return Ok(context);
    }
    let collectives = COLLECTIVES.get().copied().unwrap_or(Collectives::Host);
    context.ranks = choose_communicator(collectives, &context.backend, ranks, |ranks, device| {
        NcclRanks::join(ranks, device, NCCL_TIMEOUT).map(|ranks| ranks as Arc<dyn Communicator>)
    })?;
    *locked_communicator() = Some(context.ranks.clone());
    Ok(context)
}

/// Chooses the communicator for a run on `backend`: `host`, which uses TCP, or the result of `nccl`, which uses the GPU
/// and leaves small messages to `host`.
fn choose_communicator(
    collectives: Collectives,
    backend: &str,
    host: Arc<dyn Communicator>,
    nccl: impl FnOnce(Arc<dyn Communicator>, Gpu) -> Result<Arc<dyn Communicator>>,
) -> Result<Arc<dyn Communicator>> {
    let gpu = Backend::nvidia_gpu(backend);
    // With `--collectives nccl`, a backend without NVIDIA GPU uses the GPU of this process for the exchange alone.
    let gpu_for_exchange =
        || device_number().ok_or_else(|| "the launcher sets no number of this process on its machine".into());
    let is_first = host.rank().0 == 0;
    let error = match collectives {
        Collectives::Host => return Ok(host),
        Collectives::Nccl => return nccl(host, gpu.or_else(|_| gpu_for_exchange())),
        Collectives::Auto => match nccl(host.clone(), gpu.clone()) {
            Ok(ranks) => {
                if is_first {
                    tracing::info!("NCCL carries collectives of more than {SMALL} values");
                }
                return Ok(ranks);
            }
            // An error of the ranks themselves means that the whole job is lost, not NCCL alone.
            Err(error) if RanksError::within(&error).is_some() => return Err(error),
            Err(error) => error.chain(),
        },
    };
    match (is_first, gpu) {
        (true, Ok(_)) => tracing::warn!("TCP carries the collectives, through rank 0, since NCCL cannot: {error}"),
        (true, Err(_)) => tracing::info!("TCP carries the collectives, through rank 0: {error}"),
        (false, _) => tracing::debug!("TCP carries the collectives: {error}"),
    }
    Ok(host)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The device of this process, such as `cuda:1`. If `backend` has several devices and names none, a process of a job
/// takes the one with its number on the machine.
pub fn device(backend: &str) -> String {
    device_number().map_or_else(|| backend.into(), |number| numbered(backend, number))
}

/// `backend` with a device number, if it has several devices and names none.
fn numbered(backend: &str, number: usize) -> String {
    match roll_backends::Backend::is_numbered_name(backend) {
        true => format!("{backend}:{number}"),
        false => backend.into(),
    }
}

/// Adapts the context of a rank that is a thread of this process: the rank gets a device of its own, as a process of a
/// job has. Outside of such a thread, returns the context unchanged.
pub fn adapt(mut context: BuildContext) -> Result<BuildContext> {
    if roll_train::ranks::of_thread().is_some() {
        let number = visible_device(context.ranks.rank().0, variable("CUDA_VISIBLE_DEVICES").as_deref());
        context.backend = numbered(&context.backend, number);
    }
    Ok(context)
}

/// The first error of opening the devices of `ranks` threads of this process, as [`adapt`] names them.
pub fn unusable_device(backend: &str, ranks: usize) -> Option<Error> {
    let visible = variable("CUDA_VISIBLE_DEVICES");
    let names = (0..ranks).map(|rank| match ranks {
        1 => backend.to_string(),
        _ => numbered(backend, visible_device(rank, visible.as_deref())),
    });
    names.map(|name| roll_backends::device(&name)).find_map(Result::err)
}

/// The number of this process's device among the visible ones; `None` unless a launcher started this process.
fn device_number() -> Option<usize> {
    let local = launch::local_rank(variable)?;
    Some(visible_device(local, variable("CUDA_VISIBLE_DEVICES").as_deref()))
}

/// The number of the device for the rank with this number on its machine. Devices are counted among the visible ones,
/// because a launcher may show each process only its own device, as `srun --gpus-per-task=1` does. `visible` is the
/// value of `CUDA_VISIBLE_DEVICES`.
fn visible_device(local_rank: usize, visible: Option<&str>) -> usize {
    let count = visible.map_or(0, |list| list.split(',').filter(|device| !device.trim().is_empty()).count());
    if count == 0 { local_rank } else { local_rank % count }
}

#[cfg(test)]
mod tests {
    use roll_core::ThreadRanks;

    use super::*;

    /// What carries the values, and the error: NCCL is a rank of its own here.
    fn chosen(collectives: Collectives, backend: &str, works: Result<()>) -> std::result::Result<&'static str, String> {
        let host: Arc<dyn Communicator> = Arc::new(ThreadRanks::group(1, JOIN_TIMEOUT).remove(0));
        let carried = choose_communicator(collectives, backend, host.clone(), |_, gpu| match gpu {
            Ok(_) => works.map(|()| Arc::new(SingleRank) as Arc<dyn Communicator>),
            Err(reason) => Err(Error::Unsupported(reason)),
        });
        let name = |ranks: Arc<dyn Communicator>| if Arc::ptr_eq(&ranks, &host) { "host" } else { "nccl" };
        carried.map(name).map_err(|error| error.to_string())
    }

    #[test]
    fn auto_is_nccl_where_it_starts_and_else_the_host() {
        let broken = || Err(Error::Unsupported("no libnccl".into()));
        let lost = || Err(RanksError::Failed { rank: 1, reason: "the disk is full".into() }.into());
        assert_eq!(chosen(Collectives::Auto, "cuda:1", Ok(())), Ok("nccl"));
        assert_eq!(chosen(Collectives::Auto, "cuda:1", broken()), Ok("host"));
        assert_eq!(chosen(Collectives::Auto, "flex", Ok(())), Ok("host"));
        assert!(chosen(Collectives::Auto, "cuda", lost()).unwrap_err().contains("the disk is full"));
        assert_eq!(chosen(Collectives::Host, "cuda", Ok(())), Ok("host"));
        assert_eq!(chosen(Collectives::Nccl, "libtorch-cuda", Ok(())), Ok("nccl"));
        assert!(chosen(Collectives::Nccl, "cuda", broken()).unwrap_err().contains("no libnccl"));
    }

    #[test]
    fn devices_are_counted_among_the_visible_ones() {
        assert_eq!(
            [None, Some(""), Some("0,1,2,3"), Some("GPU-5a"), Some("2,3")].map(|list| visible_device(3, list)),
            [3, 3, 3, 0, 1]
        );
    }
}
