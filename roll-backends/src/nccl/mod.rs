//! Ranks over NCCL, for large buffers.
//!
//! **Never run on a GPU.** It was written from NCCL's documentation and compiles without CUDA. Its calls are tested
//! with stand-ins of both libraries, which check arguments and order and move values between processes.
//!
//! NCCL and the CUDA runtime are loaded at run time. The ranks find each other over the *host communicator*: threads
//! or TCP. It also carries small values, barriers and failures. NCCL itself neither notices nor names a rank that
//! is missing, so every collective begins with a barrier of the host communicator. Values lie in host memory, as
//! [`Communicator`] requires, and are staged through one pair of device buffers.
//!
//! NCCL breaks one promise of [`Communicator`]: it sums in the order of its rings and trees. The sums are equal on
//! every rank, and in every run on the same machines, but the ZeRO stages then agree up to rounding instead of bit for
//! bit.

mod library;

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use roll_core::communicator::check_lengths;
use roll_core::{Communicator, Error, Fault, Rank, RanksError, Result};

use crate::sync::lock;
use library::{Cuda, Handle, NCCL_FLOAT32, NCCL_SUM, NOT_READY, Nccl, TO_DEVICE, TO_HOST, UniqueId};

/// Collectives of at most this many values use the host communicator: staging through the device takes longer.
const SMALL: usize = 1 << 12;
/// Interval at which a rank that waits for NCCL asks whether another rank failed.
const CHECK: Duration = Duration::from_millis(200);

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
    #[error("{file} has no function `{symbol}`: NCCL 2 and CUDA 11 to 13 have it")]
    Symbol { file: &'static str, symbol: &'static str, source: libloading::Error },
    /// The requested device does not exist.
    #[error("device {wanted} was requested, but this machine has {found} CUDA device(s)")]
    NoDevice { wanted: usize, found: usize },
    /// A library call failed.
    #[error("{library}: `{call}` returned {code} ({text})")]
    Call { library: &'static str, call: &'static str, code: c_int, text: String },
    /// Another rank cannot use NCCL.
    #[error("rank {rank} cannot use NCCL: {reason}")]
    Rank { rank: usize, reason: String },
}

impl From<NcclError> for Error {
    fn from(e: NcclError) -> Self {
        let fault = if matches!(e, NcclError::Call { .. }) { Fault::Failure } else { Fault::User };
        Error::component(fault, e)
    }
}

/// One process of a job, with its own GPU.
pub struct NcclRanks {
    host: Arc<dyn Communicator>,
    nccl: Nccl,
    cuda: Cuda,
    device: c_int,
    comm: Handle,
    state: Mutex<DeviceState>,
    timeout: Mutex<Duration>,
    /// The failure after which no further collective is started.
    lost: Mutex<Option<RanksError>>,
}

struct DeviceState {
    stream: Handle,
    /// Staging buffers on the device: one to send from, one to receive into.
    buffers: [Buffer; 2],
}

/// A device buffer of `values` f32.
#[derive(Clone, Copy)]
struct Buffer {
    at: *mut c_void,
    values: usize,
}

const NO_BUFFER: Buffer = Buffer { at: std::ptr::null_mut(), values: 0 };

// SAFETY: any thread may use NCCL's and CUDA's handles, one thread at a time; the lock of `state` ensures that.
unsafe impl Send for NcclRanks {}
// SAFETY: as above.
unsafe impl Sync for NcclRanks {}

impl NcclRanks {
    /// Joins the job of `host`, with GPU `device` of this machine. Must be called by every rank; if any rank cannot
    /// join, every rank gets an error that names the rank and the reason.
    pub fn join(host: Arc<dyn Communicator>, device: usize) -> Result<Arc<Self>> {
        let prepared = Self::prepare(device);
        // All ranks must be ready before NCCL starts: it would wait for ever for a missing rank.
        let own = prepared.as_ref().map_or_else(ToString::to_string, |_| String::new());
        let all = host.all_gather_bytes(own.as_bytes())?;
        let (nccl, cuda) = prepared?;
        if let Some(rank) = all.iter().position(|reason| !reason.is_empty()) {
            let reason = String::from_utf8_lossy(&all[rank]).into_owned();
            return Err(NcclError::Rank { rank, reason }.into());
        }
        let id = Self::share_unique_id(host.as_ref(), &nccl)?;
        let (mut comm, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (size, rank) = (host.world_size() as c_int, host.rank().0 as c_int);
        // SAFETY: the device is this thread's; both write one handle.
        unsafe {
            cuda.check("cudaStreamCreate", (cuda.stream_create)(&mut stream))?;
            nccl.check("ncclCommInitRank", (nccl.comm_init_rank)(&mut comm, size, id, rank))?;
        }
        Ok(Arc::new(Self {
            host,
            nccl,
            cuda,
            device: device as c_int,
            comm,
            state: Mutex::new(DeviceState { stream, buffers: [NO_BUFFER; 2] }),
            timeout: Mutex::new(Duration::from_secs(1800)),
            lost: Mutex::default(),
        }))
    }

    /// Loads the libraries and takes the device.
    fn prepare(device: usize) -> Result<(Nccl, Cuda), NcclError> {
        let cuda = Cuda::load()?;
        let nccl = Nccl::load()?;
        let mut found = 0;
        // SAFETY: writes one integer.
        cuda.check("cudaGetDeviceCount", unsafe { (cuda.get_device_count)(&mut found) })?;
        if device >= found as usize {
            return Err(NcclError::NoDevice { wanted: device, found: found as usize });
        }
        // SAFETY: the device exists.
        cuda.check("cudaSetDevice", unsafe { (cuda.set_device)(device as c_int) })?;
        Ok((nccl, cuda))
    }

    /// The job's `ncclUniqueId`, made by rank 0 and sent to every rank.
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

    /// Copies `send` to the device, runs the collective `start` on both device buffers and the stream, and copies the
    /// result to `receive`.
    fn collective(
        &self,
        what: &'static str,
        send: &[f32],
        receive: &mut [f32],
        start: impl FnOnce(*const c_void, *mut c_void, Handle) -> c_int,
    ) -> Result<()> {
        let mut state = lock(&self.state);
        if let Some(lost) = lock(&self.lost).clone() {
            return Err(lost.into());
        }
        self.host.barrier()?;
        let cuda = &self.cuda;
        // SAFETY: the device exists; the current device is per thread.
        cuda.check("cudaSetDevice", unsafe { (cuda.set_device)(self.device) })?;
        let out = state.buffers[0].reserve(cuda, send.len())?;
        let back = state.buffers[1].reserve(cuda, receive.len())?;
        // SAFETY: the buffers hold at least the number of values that is copied.
        unsafe {
            cuda.check("cudaMemcpy", (cuda.memcpy)(out, send.as_ptr().cast(), 4 * send.len(), TO_DEVICE))?;
            self.nccl.check("ncclGroupStart", (self.nccl.group_start)())?;
            let started = start(out, back, state.stream);
            let ended = (self.nccl.group_end)();
            self.nccl.check(what, started)?;
            self.nccl.check("ncclGroupEnd", ended)?;
        }
        if let Err(error) = self.wait(what, state.stream) {
            // NCCL may still access the buffers: they are leaked.
            state.buffers = [NO_BUFFER; 2];
            return Err(error);
        }
        // SAFETY: as above, and NCCL has written its result.
        let copied = unsafe { (cuda.memcpy)(receive.as_mut_ptr().cast(), back, 4 * receive.len(), TO_HOST) };
        Ok(cuda.check("cudaMemcpy", copied)?)
    }

    /// Waits until the stream has finished, another thread calls `fail`, or the timeout expires.
    fn wait(&self, what: &'static str, stream: Handle) -> Result<()> {
        let (since, timeout) = (Instant::now(), *lock(&self.timeout));
        let mut checked = since;
        loop {
            // SAFETY: a stream of this device.
            match unsafe { (self.cuda.stream_query)(stream) } {
                0 => return Ok(()),
                NOT_READY => {}
                code => return Ok(self.cuda.check("cudaStreamQuery", code)?),
            }
            if let Some(lost) = lock(&self.lost).clone() {
                return Err(lost.into());
            }
            if checked.elapsed() > CHECK {
                checked = Instant::now();
                self.host.check().inspect_err(|error| *lock(&self.lost) = RanksError::within(error).cloned())?;
            }
            if since.elapsed() > timeout {
                // All ranks have begun: which of them does not go on cannot be known.
                let lost = RanksError::Absent { absent: Vec::new(), what: what.into(), waited: timeout };
                self.fail(&lost.to_string());
                *lock(&self.lost) = Some(lost.clone());
                return Err(lost.into());
            }
            std::thread::yield_now();
        }
    }
}

impl Buffer {
    /// Returns a device pointer to at least `values` f32; reallocates if the buffer is too small.
    fn reserve(&mut self, cuda: &Cuda, values: usize) -> Result<*mut c_void, NcclError> {
        if self.values < values {
            // SAFETY: nothing uses the old buffer any more; the pointer is written before it is read.
            unsafe {
                cuda.check("cudaFree", (cuda.free)(self.at))?;
                *self = NO_BUFFER;
                cuda.check("cudaMalloc", (cuda.malloc)(&mut self.at, 4 * values))?;
            }
            self.values = values;
        }
        Ok(self.at)
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
        self.collective("ncclAllReduce", &send, values, |send, receive, stream| {
            // SAFETY: both buffers hold `n` values.
            unsafe { (self.nccl.all_reduce)(send, receive, n, NCCL_FLOAT32, NCCL_SUM, self.comm, stream) }
        })
    }

    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("reduce_scatter", values.len(), out.len(), self.world_size())?;
        let n = out.len();
        if n <= SMALL {
            return self.host.reduce_scatter(values, out);
        }
        self.collective("ncclReduceScatter", values, out, |send, receive, stream| {
            // SAFETY: the buffers hold `size * n` and `n` values.
            unsafe { (self.nccl.reduce_scatter)(send, receive, n, NCCL_FLOAT32, NCCL_SUM, self.comm, stream) }
        })
    }

    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("all_gather", out.len(), part.len(), self.world_size())?;
        let n = part.len();
        if n <= SMALL {
            return self.host.all_gather(part, out);
        }
        self.collective("ncclAllGather", part, out, |send, receive, stream| {
            // SAFETY: the buffers hold `n` and `size * n` values.
            unsafe { (self.nccl.all_gather)(send, receive, n, NCCL_FLOAT32, self.comm, stream) }
        })
    }

    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        let n = values.len();
        if n <= SMALL || root.0 >= self.world_size() {
            return self.host.broadcast(values, root);
        }
        let send = values.to_vec();
        self.collective("ncclBroadcast", &send, values, |send, receive, stream| {
            // SAFETY: both buffers hold `n` values.
            unsafe { (self.nccl.broadcast)(send, receive, n, NCCL_FLOAT32, root.0 as c_int, self.comm, stream) }
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
        let own = RanksError::Failed { rank: self.host.rank().0, reason: reason.into() };
        lock(&self.lost).get_or_insert(own);
        self.host.fail(reason);
    }

    fn check(&self) -> Result<()> {
        self.host.check()
    }
}

impl Drop for NcclRanks {
    fn drop(&mut self) {
        if lock(&self.lost).is_some() {
            // Destroying the communicator would wait for ranks that are gone; the process ends anyway.
            return;
        }
        let state = lock(&self.state);
        // SAFETY: nothing runs on the stream any more, and the handles are not used after this.
        unsafe {
            (self.cuda.set_device)(self.device);
            (self.nccl.comm_destroy)(self.comm);
            for buffer in &state.buffers {
                (self.cuda.free)(buffer.at);
            }
            (self.cuda.stream_destroy)(state.stream);
        }
    }
}
