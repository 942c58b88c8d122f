//! Ranks over NCCL, for large buffers.
//!
//! **Never run on several GPUs.** It was written from NCCL's documentation and compiles without CUDA. Its calls are
//! tested with stand-ins of both libraries, which check arguments and order and move values between processes; one rank
//! runs the real libraries where there is a GPU.
//!
//! NCCL and the CUDA runtime are loaded at run time. The ranks find each other over the *host communicator*, which is
//! TCP. It also carries small values, barriers and failures. NCCL itself neither notices nor names a rank that is
//! missing, so every collective begins with a barrier of the host communicator. Nothing waits for ever: the
//! communicator does not block, and each wait has a timeout and asks the host communicator for failures. After a
//! failure, the NCCL communicator is aborted, which ends kernels that wait for other ranks.
//!
//! Values are in host memory, as [`Communicator`] requires. They are staged through pinned memory and one pair of
//! device buffers, on a stream of their own that waits for no other kernels. All memory is allocated before the
//! barrier, because an allocation may wait until running kernels end, and NCCL's kernels end only when every rank has
//! started its own. Ranks that are threads of one process are refused for the same reason: their networks allocate at
//! any time.
//!
//! NCCL breaks one promise of [`Communicator`]: it sums in the order of its rings and trees. The sums are equal on
//! every rank, and in every run on the same machines. With such sums, however, the ZeRO stages agree up to rounding
//! instead of bit for bit.

mod comm;
mod library;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use roll_core::communicator::{self, check_lengths};
use roll_core::{Communicator, Error, Fault, Rank, RanksError, Result};
use serde::{Deserialize, Serialize};

use crate::sync::lock;
use comm::{ABORT_TIMEOUT, Comm};
use library::{
    Cuda, Handle, NCCL_FLOAT32, NCCL_SUM, NON_BLOCKING, NOT_READY, Nccl, SUCCESS, TO_DEVICE, TO_HOST, UniqueId,
};

/// Collectives of at most this many values use the host communicator: staging through the device takes longer.
pub const SMALL: usize = 1 << 12;
/// Interval at which a rank that waits for NCCL asks whether another rank failed.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Interval at which a rank asks whether NCCL has connected it, or tries to lock the state of another thread's
/// collective.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Timeout of a collective until [`Communicator::set_timeout`] sets another.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Bytes of a value.
const F32_BYTES: usize = size_of::<f32>();
/// Values that are copied between host and device at a time, through pinned memory.
const CHUNK: usize = 1 << 22;

/// Errors of NCCL and the CUDA runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum NcclError {
    /// A library cannot be loaded.
    #[error(
        "{what} cannot be loaded ({tried}): {reason}; install {install}, and name its directory in LD_LIBRARY_PATH"
    )]
    Library { what: &'static str, tried: String, install: &'static str, reason: String },
    /// A library lacks a function: it is another library or too old.
    #[error("{file} has no function `{symbol}`: NCCL from 2.14 and CUDA 11 to 13 have it")]
    Symbol { file: &'static str, symbol: &'static str, source: libloading::Error },
    /// This process computes on no GPU.
    #[error("{reason}")]
    NoGpu { reason: String },
    /// The requested device does not exist.
    #[error("device {wanted} was requested, but this machine has {found} CUDA device(s)")]
    NoDevice { wanted: usize, found: usize },
    /// Two ranks are in one process.
    #[error(
        "ranks {first} and {second} are threads of one process, and NCCL is for processes: start one for each GPU \
         (`torchrun --no-python --nproc-per-node N roll run ...`), or let threads exchange values in host memory"
    )]
    Threads { first: usize, second: usize },
    /// Two ranks have one GPU.
    #[error(
        "ranks {first} and {second} use the same GPU ({gpu}), and NCCL needs one for each process: does the launcher \
         set LOCAL_RANK, and are there as many GPUs as processes?"
    )]
    SharedGpu { first: usize, second: usize, gpu: String },
    /// The ranks did not connect.
    #[error(
        "NCCL did not connect all ranks within {} s: NCCL_DEBUG=INFO logs what it tries, and NCCL_SOCKET_IFNAME names \
         the network interface to use", .limit.as_secs()
    )]
    Slow { limit: Duration },
    /// A library call failed.
    #[error("{library}: `{call}` returned {code} ({text})")]
    Call { library: &'static str, call: &'static str, code: c_int, text: String },
    /// Another rank cannot use NCCL.
    #[error("rank {rank} cannot use NCCL: {reason}")]
    Rank { rank: usize, reason: String },
}

impl From<NcclError> for Error {
    fn from(e: NcclError) -> Self {
        let is_failure = matches!(e, NcclError::Call { .. } | NcclError::Slow { .. });
        Error::component(if is_failure { Fault::Failure } else { Fault::User }, e)
    }
}

/// One process of a job, with its own GPU.
pub struct NcclRanks {
    host: Arc<dyn Communicator>,
    cuda: Cuda,
    device: c_int,
    state: Mutex<DeviceState>,
    timeout: Mutex<Duration>,
    /// The failure after which no further collective is started.
    lost: Mutex<Option<RanksError>>,
}

struct DeviceState {
    /// `None` after a failure: the communicator was aborted.
    comm: Option<Comm>,
    stream: Handle,
    /// Staging buffers on the device: one to send from, one to receive into.
    buffers: [Buffer; 2],
    pinned: Buffer,
}

/// A buffer of f32.
struct Buffer {
    side: Side,
    address: *mut c_void,
    /// Number of f32.
    capacity: usize,
}

#[derive(Clone, Copy)]
enum Side {
    Device,
    /// Page-locked host memory.
    Pinned,
}

/// The process and the GPU of a rank, which the ranks exchange before NCCL starts.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Identity {
    process: u64,
    /// The identifier of the running kernel; empty if unknown.
    machine: String,
    /// PCI address.
    gpu: String,
}

// SAFETY: any thread may use NCCL's and CUDA's handles, one thread at a time; the lock of `state` ensures that.
unsafe impl Send for NcclRanks {}
// SAFETY: as above.
unsafe impl Sync for NcclRanks {}

impl NcclRanks {
    /// Joins the job of `host` with a GPU: `device` is its number on this machine, or the reason why this process has
    /// no GPU. Must be called by every rank. Waits at most `limit` until NCCL has connected the ranks.
    ///
    /// If any rank cannot join, every rank gets an error with the reason, and `host` can still be used. Only if the
    /// error is a [`RanksError`], the job is lost.
    pub fn join(
        host: Arc<dyn Communicator>,
        device: std::result::Result<usize, String>,
        limit: Duration,
    ) -> Result<Arc<Self>> {
        // All ranks must be ready before NCCL starts, because it would wait until the limit for a missing rank.
        let prepared = device.map_err(|reason| NcclError::NoGpu { reason }).and_then(prepare);
        let own_identity = prepared.as_ref().map(|prepared| prepared.identity.clone()).map_err(ToString::to_string);
        let identities: Vec<std::result::Result<Identity, String>> = communicator::join(host.as_ref(), &own_identity)?;
        let Prepared { nccl, cuda, device, .. } = prepared?;
        check_identities(identities)?;
        let id = share_unique_id(host.as_ref(), &nccl)?;
        let connected = match connect(host.as_ref(), (nccl, cuda), device, id, limit) {
            Err(lost) if RanksError::within(&lost).is_some() => return Err(lost),
            connected => connected,
        };
        let own_failure = connected.as_ref().err().map(ToString::to_string);
        let (comm, stream) = match (connected, check_all_connected(host.as_ref(), own_failure)) {
            (Ok(connected), Ok(())) => connected,
            // Another rank failed, or the job is lost.
            (Ok((comm, _)), Err(error)) => {
                comm.abort();
                return Err(error);
            }
            // This rank's own error is more specific than the message that it exchanged, unless the job is lost.
            (Err(own), Err(error)) => {
                return Err(if RanksError::within(&error).is_some() { error } else { own });
            }
            (Err(own), Ok(())) => return Err(own),
        };
        Ok(Arc::new(Self {
            host,
            cuda,
            device,
            state: Mutex::new(DeviceState {
                comm: Some(comm),
                stream,
                buffers: [Buffer::empty(Side::Device), Buffer::empty(Side::Device)],
                pinned: Buffer::empty(Side::Pinned),
            }),
            timeout: Mutex::new(DEFAULT_TIMEOUT),
            lost: Mutex::default(),
        }))
    }

    /// Copies `send` to the device, runs the collective `start` on both device buffers and the stream, and copies the
    /// result to `receive`. After a failure the communicator is aborted: the ranks are no longer in step.
    fn collective(
        &self,
        what: &'static str,
        send: &[f32],
        receive: &mut [f32],
        start: impl FnOnce(&Comm, *const c_void, *mut c_void, Handle) -> c_int,
    ) -> Result<()> {
        let mut state = lock(&self.state);
        if let Some(lost) = lock(&self.lost).clone() {
            return Err(lost.into());
        }
        let result = self.staged(&mut state, what, send, receive, start);
        if let Err(error) = &result {
            self.give_up(&mut state, error);
        }
        result
    }

    /// Keeps the failure of a collective as the error of later ones, reports it to the other ranks, and aborts the
    /// communicator.
    fn give_up(&self, state: &mut DeviceState, error: &Error) {
        let own_failure = || RanksError::Failed { rank: self.host.rank().0, reason: error.chain() };
        let lost = RanksError::within(error).cloned().unwrap_or_else(own_failure);
        lock(&self.lost).get_or_insert_with(|| lost.clone());
        let reason = match lost {
            RanksError::Failed { rank, reason } if rank == self.host.rank().0 => reason,
            lost => lost.to_string(),
        };
        // Has no effect if another rank reported its failure before, because the first failure counts.
        self.host.fail(&reason);
        // NCCL may access the buffers until it has ended: they are leaked.
        if let Some(comm) = state.comm.take() {
            comm.abort();
        }
    }

    /// Does the work of [`NcclRanks::collective`], but leaves the communicator as it is after a failure.
    fn staged(
        &self,
        state: &mut DeviceState,
        what: &'static str,
        send: &[f32],
        receive: &mut [f32],
        start: impl FnOnce(&Comm, *const c_void, *mut c_void, Handle) -> c_int,
    ) -> Result<()> {
        let (cuda, stream) = (&self.cuda, state.stream);
        // SAFETY: the device exists; the current device is per thread.
        cuda.check("cudaSetDevice", unsafe { (cuda.set_device)(self.device) })?;
        let send_buffer = state.buffers[0].reserve(cuda, send.len())?;
        let receive_buffer = state.buffers[1].reserve(cuda, receive.len())?;
        let pinned = state.pinned.reserve(cuda, send.len().max(receive.len()).min(CHUNK))?;
        let copy_and_wait = |to: *mut c_void, from: *const c_void, values: usize, direction: c_int| {
            // SAFETY: both buffers hold at least this number of values, and nothing else uses them.
            let code = unsafe { (cuda.memcpy_async)(to, from, F32_BYTES * values, direction, stream) };
            cuda.check("cudaMemcpyAsync", code)?;
            let no_collective = None;
            self.wait(what, stream, no_collective)
        };
        for (i, chunk) in send.chunks(CHUNK).enumerate() {
            // SAFETY: pinned memory holds a chunk; the copy before has ended.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), pinned.cast(), chunk.len()) };
            copy_and_wait(send_buffer.wrapping_byte_add(F32_BYTES * CHUNK * i), pinned, chunk.len(), TO_DEVICE)?;
        }
        self.host.barrier()?;
        let comm = state.comm.as_ref().ok_or_else(|| Error::Misuse("NCCL was aborted".into()))?;
        let nccl = comm.nccl();
        // SAFETY: no arguments; the buffers hold the values of the collective.
        unsafe {
            nccl.check("ncclGroupStart", (nccl.group_start)())?;
            let start_code = start(comm, send_buffer, receive_buffer, stream);
            let end_code = (nccl.group_end)();
            nccl.check(what, start_code)?;
            nccl.check("ncclGroupEnd", end_code)?;
        }
        self.wait(what, stream, Some(comm))?;
        for (i, chunk) in receive.chunks_mut(CHUNK).enumerate() {
            copy_and_wait(pinned, receive_buffer.wrapping_byte_add(F32_BYTES * CHUNK * i), chunk.len(), TO_HOST)?;
            // SAFETY: pinned memory holds a chunk; the copy into it has ended.
            unsafe { std::ptr::copy_nonoverlapping(pinned.cast(), chunk.as_mut_ptr(), chunk.len()) };
        }
        Ok(())
    }

    /// Waits until the stream has finished. Fails if NCCL or another rank fails, if another thread calls `fail`, or if
    /// the timeout expires. `comm` is `Some` if the stream waits for a collective. NCCL puts a collective on the stream
    /// some time after it was begun: when the communicator is ready.
    fn wait(&self, what: &'static str, stream: Handle, comm: Option<&Comm>) -> Result<()> {
        let (start, timeout) = (Instant::now(), *lock(&self.timeout));
        // Copies are on the stream at once, a collective when the communicator is ready.
        let (mut last_check, mut is_launched) = (start, comm.is_none());
        loop {
            if let Some(comm) = comm {
                is_launched |= comm.is_ready()?;
            }
            if is_launched {
                // SAFETY: a stream of this device.
                match unsafe { (self.cuda.stream_query)(stream) } {
                    SUCCESS => return Ok(()),
                    NOT_READY => {}
                    code => return Ok(self.cuda.check("cudaStreamQuery", code)?),
                }
            }
            if let Some(lost) = lock(&self.lost).clone() {
                return Err(lost.into());
            }
            if last_check.elapsed() > CHECK_INTERVAL {
                last_check = Instant::now();
                self.host.check()?;
            }
            if start.elapsed() > timeout {
                // All ranks have passed the barrier. The rank that hangs is therefore unknown.
                return Err(RanksError::Absent { absent: Vec::new(), what: what.into(), waited: timeout }.into());
            }
            std::thread::yield_now();
        }
    }
}

/// A rank that is ready to start NCCL.
struct Prepared {
    nccl: Nccl,
    cuda: Cuda,
    device: c_int,
    identity: Identity,
}

/// Loads the libraries, makes the device this thread's current device, and finds out its PCI address.
fn prepare(device: usize) -> std::result::Result<Prepared, NcclError> {
    let cuda = Cuda::load()?;
    let nccl = Nccl::load()?;
    let mut found = 0;
    // SAFETY: writes one integer.
    cuda.check("cudaGetDeviceCount", unsafe { (cuda.get_device_count)(&mut found) })?;
    if device >= found as usize {
        return Err(NcclError::NoDevice { wanted: device, found: found as usize });
    }
    let device = device as c_int;
    /// CUDA requires at least 13: `domain:bus:device.function` in hexadecimal digits, and a zero.
    const PCI_ADDRESS_BYTES: usize = 32;
    let mut gpu: [c_char; PCI_ADDRESS_BYTES] = [0; PCI_ADDRESS_BYTES];
    // SAFETY: the device exists; the text is written into the buffer, and ends with a zero.
    unsafe {
        cuda.check("cudaSetDevice", (cuda.set_device)(device))?;
        let code = (cuda.device_get_pci_bus_id)(gpu.as_mut_ptr(), gpu.len() as c_int, device);
        cuda.check("cudaDeviceGetPCIBusId", code)?;
    }
    let gpu = CStr::from_bytes_until_nul(bytemuck::cast_slice(&gpu)).unwrap_or_default();
    static PROCESS: OnceLock<u64> = OnceLock::new();
    let identity = Identity {
        process: *PROCESS.get_or_init(rand::random),
        machine: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
        gpu: gpu.to_string_lossy().into_owned(),
    };
    Ok(Prepared { nccl, cuda, device, identity })
}

/// Fails unless each rank is a process with a GPU of its own.
fn check_identities(all: Vec<std::result::Result<Identity, String>>) -> std::result::Result<(), NcclError> {
    let mut lower_ranks: Vec<Identity> = Vec::new();
    for (rank, identity) in all.into_iter().enumerate() {
        let identity = identity.map_err(|reason| NcclError::Rank { rank, reason })?;
        if let Some(first) = lower_ranks.iter().position(|other| other.process == identity.process) {
            return Err(NcclError::Threads { first, second: rank });
        }
        let has_same_gpu = |other: &Identity| {
            let is_machine_known = !identity.machine.is_empty();
            is_machine_known && (&other.machine, &other.gpu) == (&identity.machine, &identity.gpu)
        };
        if let Some(first) = lower_ranks.iter().position(has_same_gpu) {
            return Err(NcclError::SharedGpu { first, second: rank, gpu: identity.gpu });
        }
        lower_ranks.push(identity);
    }
    Ok(())
}

/// The job's `ncclUniqueId`, which rank 0 creates and sends to every rank.
fn share_unique_id(host: &dyn Communicator, nccl: &Nccl) -> Result<UniqueId> {
    let mut id = UniqueId([0; UniqueId::BYTES]);
    let mut created = Ok(());
    if host.rank().0 == 0 {
        // SAFETY: writes one identifier.
        created = nccl.check("ncclGetUniqueId", unsafe { (nccl.get_unique_id)(&mut id) });
    }
    // Sent even after a failure: the other ranks wait for it.
    let ids = host.all_gather_bytes(if created.is_ok() { &id.0 } else { &[] })?;
    created?;
    match ids.first().and_then(|bytes| <[u8; UniqueId::BYTES]>::try_from(bytes.as_slice()).ok()) {
        Some(bytes) => Ok(UniqueId(bytes)),
        None => Err(NcclError::Rank { rank: 0, reason: "it could not create the job's identifier".into() }.into()),
    }
}

/// Exchanges with all ranks whether they are connected. `own_failure` is the reason why this rank is not. Fails if any
/// rank is not connected; the error names the first one.
fn check_all_connected(host: &dyn Communicator, own_failure: Option<String>) -> Result<()> {
    let failures: Vec<Option<String>> = communicator::join(host, &own_failure)?;
    let first_failure = failures.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?)));
    match first_failure {
        Some((rank, reason)) => Err(NcclError::Rank { rank, reason }.into()),
        None => Ok(()),
    }
}

/// Connects this rank with the other ranks, and makes the stream of its collectives.
fn connect(
    host: &dyn Communicator,
    (nccl, cuda): (Nccl, Cuda),
    device: c_int,
    id: UniqueId,
    limit: Duration,
) -> Result<(Comm, Handle)> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the device is this thread's; writes one handle.
    let code = unsafe { (cuda.stream_create_with_flags)(&mut stream, NON_BLOCKING) };
    cuda.check("cudaStreamCreateWithFlags", code)?;
    let comm = Comm::begin((nccl, cuda), device, (host.rank().0, host.world_size()), id)?;
    let start = Instant::now();
    let mut last_check = start;
    let error = loop {
        match comm.is_ready() {
            Ok(true) => return Ok((comm, stream)),
            Ok(false) => {}
            Err(error) => break error.into(),
        }
        if start.elapsed() > limit {
            break NcclError::Slow { limit }.into();
        }
        if last_check.elapsed() > CHECK_INTERVAL {
            last_check = Instant::now();
            if let Err(lost) = host.check() {
                break lost;
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    comm.abort();
    Err(error)
}

impl Buffer {
    const fn empty(side: Side) -> Self {
        Self { side, address: std::ptr::null_mut(), capacity: 0 }
    }

    /// Returns a pointer to at least `values` f32; reallocates if the buffer is too small.
    fn reserve(&mut self, cuda: &Cuda, values: usize) -> Result<*mut c_void, NcclError> {
        if self.capacity < values {
            self.free(cuda)?;
            let bytes = F32_BYTES * values;
            // SAFETY: the pointer is written before it is read.
            unsafe {
                match self.side {
                    Side::Device => cuda.check("cudaMalloc", (cuda.malloc)(&mut self.address, bytes))?,
                    Side::Pinned => cuda.check("cudaMallocHost", (cuda.malloc_host)(&mut self.address, bytes))?,
                }
            }
            self.capacity = values;
        }
        Ok(self.address)
    }

    fn free(&mut self, cuda: &Cuda) -> Result<(), NcclError> {
        let Self { address, .. } = std::mem::replace(self, Self::empty(self.side));
        // SAFETY: nothing uses the buffer any more. Both functions accept null.
        unsafe {
            match self.side {
                Side::Device => cuda.check("cudaFree", (cuda.free)(address)),
                Side::Pinned => cuda.check("cudaFreeHost", (cuda.free_host)(address)),
            }
        }
    }
}

impl Communicator for NcclRanks {
    fn rank(&self) -> Rank {
        self.host.rank()
    }

    fn world_size(&self) -> usize {
        self.host.world_size()
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        let n = values.len();
        if n <= SMALL {
            return self.host.all_reduce(values);
        }
        let send = values.to_vec();
        self.collective("ncclAllReduce", &send, values, |comm, send, receive, stream| {
            // SAFETY: both buffers hold `n` values.
            unsafe { (comm.nccl().all_reduce)(send, receive, n, NCCL_FLOAT32, NCCL_SUM, comm.handle(), stream) }
        })
    }

    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("reduce_scatter", values.len(), out.len(), self.world_size())?;
        let n = out.len();
        if n <= SMALL {
            return self.host.reduce_scatter(values, out);
        }
        self.collective("ncclReduceScatter", values, out, |comm, send, receive, stream| {
            // SAFETY: the buffers hold `size * n` and `n` values.
            unsafe { (comm.nccl().reduce_scatter)(send, receive, n, NCCL_FLOAT32, NCCL_SUM, comm.handle(), stream) }
        })
    }

    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("all_gather", out.len(), part.len(), self.world_size())?;
        let n = part.len();
        if n <= SMALL {
            return self.host.all_gather(part, out);
        }
        self.collective("ncclAllGather", part, out, |comm, send, receive, stream| {
            // SAFETY: the buffers hold `n` and `size * n` values.
            unsafe { (comm.nccl().all_gather)(send, receive, n, NCCL_FLOAT32, comm.handle(), stream) }
        })
    }

    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        let n = values.len();
        if n <= SMALL || root.0 >= self.world_size() {
            return self.host.broadcast(values, root);
        }
        let send = values.to_vec();
        self.collective("ncclBroadcast", &send, values, |comm, send, receive, stream| {
            // SAFETY: both buffers hold `n` values.
            unsafe { (comm.nccl().broadcast)(send, receive, n, NCCL_FLOAT32, root.0 as c_int, comm.handle(), stream) }
        })
    }

    fn barrier(&self) -> Result<()> {
        self.host.barrier()
    }

    fn set_timeout(&self, timeout: Duration) {
        *lock(&self.timeout) = timeout;
        self.host.set_timeout(timeout);
    }

    fn fail(&self, reason: &str) {
        let failure = RanksError::Failed { rank: self.host.rank().0, reason: reason.into() };
        lock(&self.lost).get_or_insert(failure);
        self.host.fail(reason);
        // Aborts the communicator: the process may end next, and its end would wait for kernels that wait for other
        // ranks. If another thread holds the state, it is in a collective, notices the failure and aborts by itself.
        let start = Instant::now();
        while start.elapsed() < ABORT_TIMEOUT {
            let mut state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(state)) => PoisonError::into_inner(state),
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(POLL_INTERVAL);
                    continue;
                }
            };
            if let Some(comm) = state.comm.take() {
                comm.abort();
            }
            return;
        }
    }

    fn check(&self) -> Result<()> {
        self.host.check()
    }
}

impl Drop for NcclRanks {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        // Kernels of an aborted communicator may still use the buffers, which are leaked.
        let Some(comm) = state.comm.take() else { return };
        // SAFETY: nothing runs on the stream any more, and the handles are not used after this.
        unsafe {
            (self.cuda.set_device)(self.device);
            comm.destroy();
            (self.cuda.stream_destroy)(state.stream);
        }
        let DeviceState { buffers: [send, receive], pinned, .. } = &mut *state;
        for buffer in [send, receive, pinned] {
            let _ = buffer.free(&self.cuda);
        }
    }
}
