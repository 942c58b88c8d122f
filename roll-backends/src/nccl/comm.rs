//! An NCCL communicator that does not wait for other ranks: calls other than [`Comm::abort`] return at once, and
//! [`Comm::is_ready`] returns whether NCCL has finished the work that they began.

use std::ffi::c_int;
use std::sync::mpsc;
use std::time::Duration;

use super::NcclError;
use super::library::{Config, Cuda, Handle, IN_PROGRESS, Nccl, UniqueId};

/// How long to wait until an aborted communicator has ended its kernels.
pub(super) const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// `ncclComm_t` of this rank, with the libraries that it needs.
pub(super) struct Comm {
    nccl: Nccl,
    cuda: Cuda,
    device: c_int,
    handle: Handle,
}

// SAFETY: any thread may use a communicator, one thread at a time, as `&mut` and ownership ensure.
unsafe impl Send for Comm {}

impl Comm {
    /// Begins to connect this rank with the others. They are connected when [`Comm::is_ready`] returns true.
    pub(super) fn begin(
        (nccl, cuda): (Nccl, Cuda),
        device: c_int,
        (rank, size): (usize, usize),
        id: UniqueId,
    ) -> Result<Self, NcclError> {
        let mut handle = std::ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: the device is this thread's; NCCL reads the configuration and writes one handle.
        let code = unsafe { (nccl.comm_init_rank_config)(&mut handle, size as c_int, id, rank as c_int, &mut config) };
        nccl.check("ncclCommInitRankConfig", code)?;
        Ok(Self { nccl, cuda, device, handle })
    }

    pub(super) fn nccl(&self) -> &Nccl {
        &self.nccl
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Whether NCCL has finished the work that was begun: connecting the ranks, or putting a collective on its stream.
    /// Fails if that work failed, or if NCCL lost another rank meanwhile.
    pub(super) fn is_ready(&self) -> Result<bool, NcclError> {
        let mut state = IN_PROGRESS;
        // SAFETY: writes one integer.
        let code = unsafe { (self.nccl.comm_get_async_error)(self.handle, &mut state) };
        self.nccl.check("ncclCommGetAsyncError", code)?;
        self.nccl.check("ncclCommGetAsyncError", state)?;
        Ok(state != IN_PROGRESS)
    }

    /// Ends everything that is under way, whatever the other ranks do. Waits for NCCL's threads to end, but no longer
    /// than [`ABORT_TIMEOUT`].
    pub(super) fn abort(self) {
        let (done, aborted) = mpsc::channel();
        let abort = move || {
            // Captures the communicator as a whole, because only the whole is `Send`.
            let comm = self;
            // SAFETY: the device exists; the handle is not used after this.
            unsafe {
                (comm.cuda.set_device)(comm.device);
                (comm.nccl.comm_abort)(comm.handle);
            }
            let _ = done.send(());
        };
        let started = std::thread::Builder::new().name("aborts NCCL".into()).spawn(abort);
        if started.is_err() || aborted.recv_timeout(ABORT_TIMEOUT).is_err() {
            tracing::warn!("NCCL did not end within {} s of being aborted", ABORT_TIMEOUT.as_secs());
        }
    }

    /// Releases a communicator that has nothing under way. The device must be this thread's current device.
    pub(super) fn destroy(self) {
        // SAFETY: the handle is not used after this.
        unsafe { (self.nccl.comm_destroy)(self.handle) };
    }
}
