//! Ranks over MPI, started by `mpirun -n N roll run ...` or a cluster's launcher of MPI jobs.
//!
//! Collectives are started non-blocking and polled, for two reasons: a rank that fails must be able to notify the other
//! ranks, and a rank that hangs must not block the job for ever. Sums are computed here rather than by MPI, whose order
//! of summation depends on sizes, algorithms and versions; [`Communicator`] promises a fixed order.
//!
//! A rank that fails sends its reason to the other ranks, waits a moment so that they can stop with that reason, and
//! aborts the job. If a rank is killed, the launcher ends the job.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mpi::ffi;
use roll_core::communicator::{check_lengths, check_parts, sum_in_order};
use roll_core::{Communicator, Rank, RanksError, Result};

use crate::BackendError;
use crate::sync::lock;

/// Number of values in the buffer of one collective; longer data take several. MPI's counts are `i32`, and staging
/// buffers must be bounded.
const CHUNK: usize = 1 << 22;
/// Up to this many values, an all-reduce is one all-gather and a local sum: one message instead of two.
const SMALL: usize = 1 << 12;
/// Maximum length of a failure reason in bytes; longer ones are cut.
const LONGEST_REASON: usize = 4096;
/// Delay before the job is aborted, in which other ranks report why they failed. Ranks that share cores need this long.
const GRACE: Duration = Duration::from_secs(5);

/// Tags of point-to-point messages.
mod tag {
    /// A rank failed; carries the reason.
    pub const FAILED: i32 = 101;
    /// Asks whether a rank is alive; empty.
    pub const PING: i32 = 102;
    /// Answers `PING`: this rank waits in the same collective; empty.
    pub const PONG: i32 = 103;
}

/// One process of an MPI job.
pub struct MpiRanks {
    rank: usize,
    size: usize,
    timeout: Mutex<Duration>,
    /// Number of collectives so far; error messages carry it.
    calls: AtomicU64,
    /// The failure after which no further collective is started.
    lost: Mutex<Option<RanksError>>,
    /// Serialises calls to MPI (MPI_THREAD_SERIALIZED).
    exclusive: Mutex<()>,
    /// Why this rank failed. Set before `exclusive` is locked: another thread of this rank may hold that lock while it waits
    /// for other ranks.
    failing: Mutex<Option<String>>,
}

/// Whether an MPI launcher started this process.
pub fn is_launched() -> bool {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS"].iter().any(|v| std::env::var_os(v).is_some())
}

impl MpiRanks {
    /// Joins the job. May be called once per process. [`MpiRanks::finish`] or [`MpiRanks::abort`] leaves the job.
    pub fn join() -> Result<Arc<Self>> {
        let missing = |reason: &str| BackendError::Backend { name: "mpi".into(), reason: reason.into() };
        let (universe, threading) = mpi::initialize_with_threading(mpi::Threading::Serialized)
            .ok_or_else(|| missing("MPI was initialised in this process before"))?;
        if threading < mpi::Threading::Serialized {
            return Err(missing("this MPI library was built without MPI_THREAD_SERIALIZED").into());
        }
        // Dropping `universe` would call MPI_Finalize, which waits for the other ranks and so hangs if this rank
        // returns with an error.
        std::mem::forget(universe);
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialised; both write one integer.
        unsafe {
            ffi::MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank);
            ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &mut size);
        }
        Ok(Arc::new(Self {
            rank: rank as usize,
            size: size as usize,
            timeout: Mutex::new(Duration::from_secs(1800)),
            calls: AtomicU64::new(0),
            lost: Mutex::new(None),
            exclusive: Mutex::new(()),
            failing: Mutex::new(None),
        }))
    }

    /// Leaves the job after success. Waits for the other ranks, at most the timeout.
    pub fn finish(&self) -> Result<()> {
        self.barrier()?;
        // SAFETY: every rank passed the barrier, so that none waits for another; nothing calls MPI after this.
        unsafe { ffi::MPI_Finalize() };
        Ok(())
    }

    /// Aborts the job with exit code `code`, after a delay in which the other ranks can report their reasons.
    pub fn abort(&self, code: i32) -> ! {
        std::thread::sleep(GRACE);
        // SAFETY: MPI is initialised.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
        std::process::exit(code)
    }

    /// Starts a collective on owned buffers and waits for it. If it does not complete, MPI may still write to the
    /// buffers: they are then leaked.
    fn collective(
        &self,
        what: &str,
        send: Vec<f32>,
        receive: usize,
        start: impl FnOnce(*const f32, *mut f32, *mut ffi::MPI_Request),
    ) -> Result<Vec<f32>> {
        let _exclusive = lock(&self.exclusive);
        if let Some(lost) = lock(&self.lost).clone() {
            return Err(lost.into());
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let mut received = vec![0f32; receive];
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        start(send.as_ptr(), received.as_mut_ptr(), &mut request);
        match self.wait(&mut request, &format!("{what} (collective {call})")) {
            Ok(()) => Ok(received),
            Err(lost) => {
                std::mem::forget((send, received));
                *lock(&self.lost) = Some(lost.clone());
                Err(lost.into())
            }
        }
    }

    fn wait(&self, request: &mut ffi::MPI_Request, what: &str) -> Result<(), RanksError> {
        let (since, timeout) = (Instant::now(), *lock(&self.timeout));
        let mut polls = 0u32;
        loop {
            let mut done = 0;
            // SAFETY: the request is one that was started, and is only completed here.
            unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            if done != 0 {
                return Ok(());
            }
            polls += 1;
            if polls < 200 {
                std::hint::spin_loop();
                continue;
            }
            if let Some(reason) = lock(&self.failing).clone() {
                return Err(RanksError::Failed { rank: self.rank, reason });
            }
            if let Some((rank, reason)) = self.receive(tag::FAILED) {
                return Err(RanksError::Failed { rank, reason });
            }
            while let Some((rank, _)) = self.receive(tag::PING) {
                self.send(rank, tag::PONG, &[]);
            }
            if since.elapsed() > timeout {
                let lost = RanksError::Absent { absent: self.absent(), what: what.into(), waited: timeout };
                self.notify_failure(&lost.to_string());
                return Err(lost);
            }
            match polls < 2000 {
                true => std::thread::yield_now(),
                false => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    /// The ranks that do not answer. A rank that waits in a collective, as this one does, would answer.
    fn absent(&self) -> Vec<usize> {
        let mut silent: Vec<usize> = self.others().collect();
        silent.iter().for_each(|rank| self.send(*rank, tag::PING, &[]));
        let since = Instant::now();
        while since.elapsed() < GRACE / 2 && !silent.is_empty() {
            while let Some((rank, _)) = self.receive(tag::PONG) {
                silent.retain(|r| *r != rank);
            }
            while let Some((rank, _)) = self.receive(tag::PING) {
                self.send(rank, tag::PONG, &[]);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        silent
    }

    fn notify_failure(&self, reason: &str) {
        let end = (0..=reason.len().min(LONGEST_REASON)).rev().find(|i| reason.is_char_boundary(*i)).unwrap_or(0);
        self.others().for_each(|rank| self.send(rank, tag::FAILED, &reason.as_bytes()[..end]));
        // Small messages leave as soon as the library makes progress, which these calls let it do.
        for _ in 0..100 {
            let _ = self.receive(tag::PONG);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let own = self.rank;
        (0..self.size).filter(move |rank| *rank != own)
    }

    /// Sends a small message without waiting. The bytes are leaked, because they may not have been sent yet when this
    /// returns.
    fn send(&self, to: usize, tag: i32, bytes: &[u8]) {
        let bytes: &'static [u8] = Vec::leak(bytes.to_vec());
        // SAFETY: the bytes live for ever; the library completes a request that is freed.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (at, count) = (bytes.as_ptr().cast(), bytes.len() as i32);
            ffi::MPI_Isend(at, count, ffi::RSMPI_UINT8_T, to as i32, tag, ffi::RSMPI_COMM_WORLD, &mut request);
            ffi::MPI_Request_free(&mut request);
        }
    }

    /// Receives a small message if one has arrived: its sender and text.
    fn receive(&self, tag: i32) -> Option<(usize, String)> {
        // SAFETY: `status` is written by the probe before it is read; the buffer has the length that the probe
        // reported.
        unsafe {
            let mut status: ffi::MPI_Status = std::mem::zeroed();
            let (mut there, mut count) = (0, 0);
            ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, ffi::RSMPI_COMM_WORLD, &mut there, &mut status);
            if there == 0 {
                return None;
            }
            ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count);
            let source = status.MPI_SOURCE;
            let mut bytes = vec![0u8; count.max(0) as usize];
            let at = bytes.as_mut_ptr().cast();
            let (datatype, world) = (ffi::RSMPI_UINT8_T, ffi::RSMPI_COMM_WORLD);
            ffi::MPI_Recv(at, count, datatype, source, tag, world, ffi::RSMPI_STATUS_IGNORE);
            Some((source as usize, String::from_utf8_lossy(&bytes).into_owned()))
        }
    }

    /// All-gather: every rank's `part`, in the order of the ranks.
    fn all_gather_owned(&self, what: &str, part: &[f32]) -> Result<Vec<f32>> {
        let n = part.len() as i32;
        self.collective(what, part.to_vec(), part.len() * self.size, |send, receive, request| {
            // SAFETY: the buffers hold `n` and `size * n` values, and outlive the request.
            unsafe {
                let (float, world) = (ffi::RSMPI_FLOAT, ffi::RSMPI_COMM_WORLD);
                ffi::MPI_Iallgather(send.cast(), n, float, receive.cast(), n, float, world, request);
            }
        })
    }

    /// All-to-all: sends the i-th of `parts` (equal lengths) to rank i and returns the received parts in the order of
    /// their senders.
    fn all_to_all_owned(&self, what: &str, parts: Vec<f32>) -> Result<Vec<f32>> {
        let (length, n) = (parts.len(), (parts.len() / self.size) as i32);
        self.collective(what, parts, length, |send, receive, request| {
            // SAFETY: the buffers hold `size * n` values each, and outlive the request.
            unsafe {
                let (float, world) = (ffi::RSMPI_FLOAT, ffi::RSMPI_COMM_WORLD);
                ffi::MPI_Ialltoall(send.cast(), n, float, receive.cast(), n, float, world, request);
            }
        })
    }
}

impl Communicator for MpiRanks {
    fn rank(&self) -> Rank {
        Rank(self.rank)
    }

    fn world_size(&self) -> usize {
        self.size
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        const WHAT: &str = "all_reduce";
        if values.len() <= SMALL {
            let all = self.all_gather_owned(WHAT, values)?;
            if !values.is_empty() {
                sum_in_order(values, all.chunks_exact(values.len()));
            }
            return Ok(());
        }
        // Reduce-scatter, then all-gather.
        for chunk in values.chunks_mut(CHUNK) {
            let n = chunk.len().div_ceil(self.size);
            let mut padded = chunk.to_vec();
            padded.resize(n * self.size, 0.0);
            let received = self.all_to_all_owned(WHAT, padded)?;
            let mut part = vec![0.0; n];
            sum_in_order(&mut part, received.chunks_exact(n));
            let all = self.all_gather_owned(WHAT, &part)?;
            chunk.copy_from_slice(&all[..chunk.len()]);
        }
        Ok(())
    }

    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("reduce_scatter", values.len(), out.len(), self.size)?;
        let part = out.len();
        let at_once = (CHUNK / self.size).max(1);
        for (i, out) in out.chunks_mut(at_once).enumerate() {
            let start = i * at_once;
            let parts = (0..self.size).flat_map(|rank| &values[rank * part + start..][..out.len()]).copied().collect();
            let received = self.all_to_all_owned("reduce_scatter", parts)?;
            sum_in_order(out, received.chunks_exact(out.len()));
        }
        Ok(())
    }

    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("all_gather", out.len(), part.len(), self.size)?;
        let at_once = (CHUNK / self.size).max(1);
        for (i, chunk) in part.chunks(at_once).enumerate() {
            let all = self.all_gather_owned("all_gather", chunk)?;
            for (rank, theirs) in all.chunks_exact(chunk.len()).enumerate() {
                out[rank * part.len() + i * at_once..][..chunk.len()].copy_from_slice(theirs);
            }
        }
        Ok(())
    }

    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        if root.0 >= self.size {
            return Err(RanksError::NoSuchRank { rank: root.0, ranks: self.size }.into());
        }
        for chunk in values.chunks_mut(CHUNK) {
            let n = chunk.len() as i32;
            // The root sends from the same buffer that the other ranks receive in.
            let own = (root.0 == self.rank).then(|| chunk.to_vec());
            let received = self.collective("broadcast", Vec::new(), chunk.len(), |_, buffer, request| {
                // SAFETY: the buffer holds `n` values and outlives the request.
                unsafe {
                    if let Some(own) = &own {
                        std::ptr::copy_nonoverlapping(own.as_ptr(), buffer, own.len());
                    }
                    let (float, world) = (ffi::RSMPI_FLOAT, ffi::RSMPI_COMM_WORLD);
                    ffi::MPI_Ibcast(buffer.cast(), n, float, root.0 as i32, world, request);
                }
            })?;
            chunk.copy_from_slice(&received);
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.collective("a barrier", Vec::new(), 0, |_, _, request| {
            // SAFETY: the request outlives the call.
            unsafe {
                ffi::MPI_Ibarrier(ffi::RSMPI_COMM_WORLD, request);
            }
        })
        .map(drop)
    }

    fn set_timeout(&self, timeout: Duration) {
        *lock(&self.timeout) = timeout;
    }

    fn fail(&self, reason: &str) {
        lock(&self.failing).get_or_insert_with(|| reason.into());
        let _exclusive = lock(&self.exclusive);
        let mut lost = lock(&self.lost);
        // Any other loss is known to all ranks already: another rank failed first, or this rank announced a timeout.
        let own = |lost: &RanksError| matches!(lost, RanksError::Failed { rank, .. } if *rank == self.rank);
        if lost.as_ref().is_none_or(own) {
            *lost = Some(RanksError::Failed { rank: self.rank, reason: reason.into() });
            self.notify_failure(reason);
        }
    }

    fn all_to_all(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        let part = check_parts(values, out, self.size)?;
        let at_once = (CHUNK / self.size).max(1);
        for start in (0..part).step_by(at_once) {
            let count = at_once.min(part - start);
            let parts = (0..self.size).flat_map(|rank| &values[rank * part + start..][..count]).copied().collect();
            let received = self.all_to_all_owned("all_to_all", parts)?;
            for (rank, theirs) in received.chunks_exact(count).enumerate() {
                out[rank * part + start..][..count].copy_from_slice(theirs);
            }
        }
        Ok(())
    }
}
