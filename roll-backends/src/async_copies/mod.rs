//! Asynchronous copies between a GPU of libtorch and pinned host memory: neither kernels nor the host wait for them.
//!
//! libtorch queues every kernel in one stream, the legacy default stream. Copies use two further streams, one per
//! direction, because PCI Express transfers in both directions at once:
//!
//! ```text
//! compute   | block 0 | block 1 | block 2 |    ...    | pull 2  | pull 1  | pull 0  |
//! to host     | in 0    | in 1    | in 2
//! to device                                             | in 1    | in 0
//! ```
//!
//! `in k` is the input of block k, and `pull k` its backward pass.
//!
//! Two streams are ordered by events only, by the following rules. Each is implemented below, and a test fails without
//! it (`tests`):
//!
//! 1. A copy to the host begins after all kernel work that was queued before it: the tensor is complete then.
//! 2. The tensor is held until the kernels have been made to wait for the copy. libtorch reuses the memory of a dropped
//!    tensor at once, in the order of *its own stream*, so a later kernel would overwrite memory that the copy still
//!    reads. Nor may a kernel change the tensor in place: callers pass `source` as a Burn tensor, and Burn writes to
//!    new memory if an operand has a second handle.
//! 3. Memory for a tensor that is copied to the GPU comes from libtorch, and earlier kernels may still use its former
//!    content: the copy into it begins after all kernel work that was queued when the memory was allocated. Before the
//!    tensor is handed out, kernels are made to wait for the copy. If the tensor is dropped instead, they are made to
//!    wait before its memory is freed.
//! 4. A buffer returns to the pool together with the event after its last copy. The next user makes its stream wait for
//!    that event or, if the host itself reads or writes the buffer, makes the host wait.
//! 5. A copy to the GPU begins after the copy that filled its buffer. Either the host has waited for that copy, or the
//!    compute stream has been made to wait for it, and by rule 3 the copy to the GPU waits for the compute stream.
//! 6. If a call fails, the host waits for the copies that may have been queued, and only then is memory freed. If the
//!    wait fails too, the memory is leaked.
//!
//! Page-locking is slow (tenths of a second per GB) and is therefore done once: the pool keeps its buffers over the
//! steps, until [`CopyStreams`] is dropped. The pool is at most `spare` bytes larger than its peak use. Buffers have
//! the exact size, whereas libtorch's allocator rounds up to powers of two.

#[cfg(feature = "libtorch")]
mod cuda;
mod pool;
mod runtime;
#[cfg(test)]
mod tests;
#[cfg(feature = "libtorch")]
mod upload;

use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(feature = "libtorch")]
pub(crate) use cuda::{Cuda, copy_streams_of, disable};
use pool::{Buffer, Pool};
pub(crate) use runtime::{Runtime, RuntimeError, Stream};
#[cfg(feature = "libtorch")]
pub(crate) use upload::{upload, upload_to};

use crate::BackendError;
use crate::sync::lock;

/// The copy streams of one GPU, and its pool of pinned memory.
pub(crate) struct CopyStreams<R: Runtime> {
    runtime: R,
    pool: Mutex<Pool<R>>,
}

/// A tensor in pinned host memory, or in flight to it. `T` owns the device memory that is copied.
pub(crate) struct D2hCopy<R: Runtime, T> {
    copy_streams: Arc<CopyStreams<R>>,
    /// `None` only while the copy is dropped.
    buffer: Option<Buffer<R>>,
    bytes: usize,
    /// Reached when the copy has finished.
    done: Arc<R::Event>,
    /// `None` once the device memory is released.
    source: Option<T>,
}

/// A tensor in flight to the GPU.
pub(crate) struct H2dCopy<R: Runtime, T> {
    copy_streams: Arc<CopyStreams<R>>,
    /// Reached when the copy has finished.
    done: Arc<R::Event>,
    tensor: Option<T>,
}

/// Memory of the GPU that was just allocated, and that any thread may fill while kernels of the allocating thread run.
pub(crate) struct Destination<R: Runtime, T> {
    copy_streams: Arc<CopyStreams<R>>,
    /// Reached when earlier kernels no longer use the memory (rule 3).
    kernels_done: R::Event,
    /// The copies into the memory.
    arriving: Vec<H2dCopy<R, T>>,
}

impl From<RuntimeError> for BackendError {
    fn from(error: RuntimeError) -> Self {
        Self::Offload { reason: error.to_string() }
    }
}

impl From<RuntimeError> for roll_core::Error {
    fn from(error: RuntimeError) -> Self {
        BackendError::from(error).into()
    }
}

impl<R: Runtime> CopyStreams<R> {
    /// Creates the streams. The pool may exceed its peak use by `spare` bytes, so that buffers of different sizes do
    /// not evict one another in every step.
    pub(crate) fn new(runtime: R, spare: usize) -> Arc<Self> {
        Arc::new(Self { runtime, pool: Mutex::new(Pool::new(spare)) })
    }

    /// Starts the copy of `bytes` bytes at `device_address`, which belong to the memory of `source`, to the host.
    ///
    /// # Safety
    /// `source` must keep that memory alive, on this GPU, and nothing may write to it while `source` lives.
    pub(crate) unsafe fn begin_d2h<T>(
        self: &Arc<Self>,
        source: T,
        device_address: usize,
        bytes: usize,
    ) -> Result<D2hCopy<R, T>, RuntimeError> {
        let buffer = lock(&self.pool).take(&self.runtime, bytes)?;
        let queue = || {
            let kernels_done = self.runtime.record_event(Stream::Compute)?;
            self.runtime.stream_wait_event(Stream::ToHost, &kernels_done)?;
            if let Some(last_copy) = &buffer.last_copy {
                self.runtime.stream_wait_event(Stream::ToHost, last_copy)?;
            }
            // SAFETY: as the caller promises; the stream waits for the last use of the buffer, and both memories are
            // held until the copy has finished or the streams wait for it.
            unsafe { self.runtime.copy(Stream::ToHost, buffer.at, device_address, bytes)? };
            self.runtime.record_event(Stream::ToHost)
        };
        match queue() {
            Ok(done) => {
                let done = Arc::new(done);
                let buffer = Some(Buffer { last_copy: Some(done.clone()), ..buffer });
                Ok(D2hCopy { copy_streams: self.clone(), buffer, bytes, done, source: Some(source) })
            }
            Err(error) => {
                match self.runtime.synchronize_stream(Stream::ToHost) {
                    Ok(()) => lock(&self.pool).put(buffer),
                    Err(_) => mem::forget(source), // rule 6
                }
                Err(error)
            }
        }
    }

    /// Ensures that the pool has `count` idle buffers of `bytes`, so that one can be filled while others are copied.
    pub(crate) fn reserve(&self, bytes: usize, count: usize) -> Result<(), RuntimeError> {
        let mut pool = lock(&self.pool);
        let taken: Vec<_> = (0..count).map(|_| pool.take(&self.runtime, bytes)).collect();
        let mut result = Ok(());
        for buffer in taken {
            match buffer {
                Ok(buffer) => pool.put(buffer),
                Err(error) => result = Err(error),
            }
        }
        result
    }

    /// Queues a copy from `buffer` to `device_address`. `to` owns that memory, and kernels no longer use it
    /// after `kernels_done`.
    ///
    /// # Safety
    /// The requirements of [`D2hCopy::begin_h2d`]. `kernels_done` must follow the copy that fills `buffer`, unless the
    /// host has waited for that copy (rule 5).
    unsafe fn queue_h2d<T>(
        self: &Arc<Self>,
        buffer: &Buffer<R>,
        bytes: usize,
        to: T,
        device_address: usize,
        kernels_done: &R::Event,
    ) -> Result<H2dCopy<R, T>, RuntimeError> {
        let queue = || {
            self.runtime.stream_wait_event(Stream::ToDevice, kernels_done)?;
            // SAFETY: rules 3 and 5: this stream waits for `kernels_done`, so the memory is free and the buffer full.
            // Both are held until the copy has finished or the streams wait for it.
            unsafe { self.runtime.copy(Stream::ToDevice, device_address, buffer.at, bytes)? };
            self.runtime.record_event(Stream::ToDevice)
        };
        match queue() {
            Ok(done) => Ok(H2dCopy { copy_streams: self.clone(), done: Arc::new(done), tensor: Some(to) }),
            Err(error) => {
                if self.runtime.synchronize_stream(Stream::ToDevice).is_err() {
                    mem::forget(to); // rule 6
                }
                Err(error)
            }
        }
    }
}

impl<R: Runtime> Drop for CopyStreams<R> {
    fn drop(&mut self) {
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Memory that cannot be waited for is leaked.
        let _ = pool.shrink(&self.runtime, 0);
    }
}

impl<R: Runtime, T> D2hCopy<R, T> {
    /// Frees the device memory: makes kernels queued from now on wait for the copy.
    pub(crate) fn release(&mut self) -> Result<(), RuntimeError> {
        if self.source.is_some() {
            self.copy_streams.runtime.stream_wait_event(Stream::Compute, &self.done)?;
            self.source = None;
        }
        Ok(())
    }

    /// Starts the copy back to the GPU, to `device_address`. `to` owns that memory, which must have been allocated
    /// before this call.
    ///
    /// # Safety
    /// The memory must have the same size and be on this GPU, and work queued later must not use it before
    /// [`H2dCopy::into_tensor`].
    pub(crate) unsafe fn begin_h2d<U>(&mut self, to: U, device_address: usize) -> Result<H2dCopy<R, U>, RuntimeError> {
        self.release()?;
        let Some(buffer) = &mut self.buffer else {
            return Err(RuntimeError { call: "a copy to the GPU", reason: "its buffer is gone".into() });
        };
        let kernels_done = self.copy_streams.runtime.record_event(Stream::Compute)?;
        // SAFETY: as the caller promises. Rule 5: the compute stream waits for `done` (`release`) before
        // `kernels_done`, or this thread has waited (`Self::wait_for_bytes`, after which `release` does nothing).
        let copy = unsafe { self.copy_streams.queue_h2d(buffer, self.bytes, to, device_address, &kernels_done)? };
        buffer.last_copy = Some(copy.done.clone());
        Ok(copy)
    }

    /// Waits until the copy has finished and returns its bytes.
    pub(crate) fn wait_for_bytes(&mut self) -> Result<&[u8], RuntimeError> {
        self.copy_streams.runtime.synchronize_event(&self.done)?;
        self.source = None;
        let Some(buffer) = &self.buffer else { return Ok(&[]) };
        // SAFETY: the buffer is unshared, has at least that size, and is initialised.
        Ok(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(buffer.at), self.bytes) })
    }
}

impl<R: Runtime, T> Drop for D2hCopy<R, T> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if self.release().is_err() && self.copy_streams.runtime.synchronize_stream(Stream::ToHost).is_err() {
            mem::forget(self.source.take()); // rule 6
            return;
        }
        lock(&self.copy_streams.pool).put(buffer);
    }
}

impl<R: Runtime, T> H2dCopy<R, T> {
    /// Makes kernels queued from now on wait for the copy, and returns the tensor.
    pub(crate) fn into_tensor(mut self) -> Result<T, RuntimeError> {
        self.copy_streams.runtime.stream_wait_event(Stream::Compute, &self.done)?;
        self.tensor.take().ok_or(RuntimeError { call: "a copy to the GPU", reason: "it was taken before".into() })
    }
}

impl<R: Runtime, T> Destination<R, T> {
    /// A destination whose copies wait for the kernels that are queued now. Call this after the allocation of the
    /// memory, on the thread that queues kernels.
    pub(crate) fn new(copy_streams: &Arc<CopyStreams<R>>) -> Result<Self, RuntimeError> {
        let kernels_done = copy_streams.runtime.record_event(Stream::Compute)?;
        Ok(Self { copy_streams: copy_streams.clone(), kernels_done, arriving: Vec::new() })
    }

    /// Lets `write` fill a pinned buffer of `bytes`, and starts the buffer's copy to `device_address`. `to` owns that
    /// memory.
    ///
    /// # Safety
    /// The memory must have that size, be on this GPU, and be allocated before [`Destination::new`]. Work that is
    /// queued later must not use it before [`Destination::arrive`].
    pub(crate) unsafe fn fill(
        &mut self,
        bytes: usize,
        write: impl FnOnce(&mut [u8]),
        to: T,
        device_address: usize,
    ) -> Result<(), RuntimeError> {
        let CopyStreams { runtime, pool } = self.copy_streams.as_ref();
        let mut buffer = lock(pool).take(runtime, bytes)?;
        if let Some(last_copy) = buffer.last_copy.take() {
            // If this fails, the buffer may be in use. It is leaked: `Buffer` has no destructor.
            runtime.synchronize_event(&last_copy)?;
        }
        // SAFETY: `buffer` is unshared memory of at least that size, and no copy uses it.
        write(unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(buffer.at), bytes) });
        // If this fails, the copy may be in flight. The buffer is leaked, too.
        // SAFETY: as the caller promises.
        let copy = unsafe { self.copy_streams.queue_h2d(&buffer, bytes, to, device_address, &self.kernels_done) }?;
        buffer.last_copy = Some(copy.done.clone());
        lock(pool).put(buffer);
        self.arriving.push(copy);
        Ok(())
    }

    /// Makes kernels queued from now on wait for the copies.
    pub(crate) fn arrive(self) -> Result<(), RuntimeError> {
        self.arriving.into_iter().try_for_each(|copy| copy.into_tensor().map(drop))
    }
}

impl<R: Runtime, T> Drop for H2dCopy<R, T> {
    fn drop(&mut self) {
        let Some(tensor) = self.tensor.take() else { return };
        let runtime = &self.copy_streams.runtime;
        if runtime.stream_wait_event(Stream::Compute, &self.done).is_err()
            && runtime.synchronize_stream(Stream::ToDevice).is_err()
        {
            mem::forget(tensor); // rule 6
        }
    }
}
