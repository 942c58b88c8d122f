//! Copies between a GPU of libtorch's and page-locked host memory that neither the kernels nor this thread wait for.
//!
//! libtorch has one stream here, the legacy default stream, in which every kernel is queued. Copies go through two
//! more, one per direction, since PCI Express carries both at once:
//!
//! ```text
//! compute   | block 0 | block 1 | block 2 |    ...    | pull 2  | pull 1  | pull 0  |
//! to host     | in 0    | in 1    | in 2
//! to device                                             | in 1    | in 0
//! ```
//!
//! Nothing orders two streams but events, so these rules do. Each has its place in the code below, and a test that
//! fails without it (`tests.rs`):
//!
//! 1. A copy to the host begins after everything that was queued for the kernels when it was asked for: its tensor is
//!    complete then.
//! 2. The tensor is held until the kernels wait for the copy. libtorch gives the memory of a tensor that is dropped to
//!    the next one *of its own stream* at once, in the order of that stream, so that a later kernel would overwrite
//!    memory that the copy still reads. It is Burn's handle that is held: without a second one, Burn's operations write
//!    into their operand.
//! 3. Memory for a tensor that returns comes from libtorch, and earlier kernels may still use its former content: the
//!    copy into it begins after all that was queued for them when it was taken. The kernels wait for the copy before
//!    the tensor is given out. If it is dropped before, they wait as well, before its memory is.
//! 4. A buffer goes back to the pool with the event behind its last copy. Who takes it makes its stream wait for that
//!    event, or, before the host itself reads or writes it, this thread.
//! 5. Where a call fails, the copies that may have been queued are waited for by this thread before memory is given
//!    away; if even that fails, the memory is leaked.
//!
//! Page-locking is slow (tenths of a second per GB) and so done once: the pool keeps its buffers over the steps, and
//! the process frees them. The pool is hardly larger than the most that was in use at once. Sizes are exact, while
//! libtorch's own allocator rounds them up to powers of two.

#[cfg(feature = "libtorch")]
mod cuda;
#[cfg(test)]
mod fake;
#[cfg(target_os = "linux")]
mod pages;
mod pool;
mod runtime;
#[cfg(test)]
mod tests;
#[cfg(feature = "libtorch")]
mod upload;

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(feature = "libtorch")]
pub(crate) use cuda::{Cuda, give_up, lines};
use pool::{Buffer, Pool};
pub(crate) use runtime::{Failed, Runtime, Stream};
#[cfg(feature = "libtorch")]
pub(crate) use upload::upload;

use crate::BackendError;

/// The streams for copies of one GPU, and the page-locked memory beside it.
pub(crate) struct Lines<R: Runtime> {
    runtime: R,
    pool: Mutex<Pool<R>>,
}

/// A tensor in page-locked host memory, or on its way there. `T` owns the memory that is copied.
pub(crate) struct Leaving<R: Runtime, T> {
    lines: Arc<Lines<R>>,
    buffer: Option<Buffer<R>>,
    bytes: usize,
    left: Arc<R::Event>,
    source: Option<T>,
}

/// A tensor on its way back to the GPU.
pub(crate) struct Returning<R: Runtime, T> {
    lines: Arc<Lines<R>>,
    arrived: Arc<R::Event>,
    tensor: Option<T>,
}

impl From<Failed> for BackendError {
    fn from(failed: Failed) -> Self {
        Self::Offload { reason: failed.to_string() }
    }
}

impl From<Failed> for roll_core::Error {
    fn from(failed: Failed) -> Self {
        BackendError::from(failed).into()
    }
}

impl<R: Runtime> Lines<R> {
    /// `spare` bytes may be page-locked above the most that was in use at once, so that tensors of one size need not
    /// make way for a few of another in every step.
    pub(crate) fn new(runtime: R, spare: usize) -> Arc<Self> {
        Arc::new(Self { runtime, pool: Mutex::new(Pool::new(spare)) })
    }

    /// Sends `bytes` at `at`, which lie in the memory of `source`, to the host.
    ///
    /// # Safety
    /// `source` keeps that memory, on this GPU, and nothing writes it while it lives.
    pub(crate) unsafe fn leave<T>(
        self: &Arc<Self>,
        source: T,
        at: usize,
        bytes: usize,
    ) -> Result<Leaving<R, T>, Failed> {
        let buffer = self.lock().take(&self.runtime, bytes)?;
        let queued = || {
            let complete = self.runtime.record(Stream::Compute)?;
            self.runtime.wait(Stream::ToHost, &complete)?;
            if let Some(last) = &buffer.last {
                self.runtime.wait(Stream::ToHost, last)?;
            }
            // SAFETY: as the caller promises; the stream waits for the last use of the buffer, and both are held until
            // the copy is done, or the streams wait for it.
            unsafe { self.runtime.copy(Stream::ToHost, buffer.at, at, bytes)? };
            self.runtime.record(Stream::ToHost)
        };
        match queued() {
            Ok(left) => {
                let left = Arc::new(left);
                let buffer = Some(Buffer { last: Some(left.clone()), ..buffer });
                Ok(Leaving { lines: self.clone(), buffer, bytes, left, source: Some(source) })
            }
            Err(failed) => {
                match self.runtime.drain(Stream::ToHost) {
                    Ok(()) => self.lock().put(buffer),
                    Err(_) => mem::forget(source),
                }
                Err(failed)
            }
        }
    }

    /// Sends `bytes`, which `fill` writes to page-locked memory, to the GPU. `to` has the address of memory for them,
    /// which was taken before this call, and keeps it.
    ///
    /// # Safety
    /// As [`Leaving::back`].
    pub(crate) unsafe fn bring<T>(
        self: &Arc<Self>,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]),
        to: T,
        at: usize,
    ) -> Result<Returning<R, T>, Failed> {
        let mut buffer = self.lock().take(&self.runtime, bytes)?;
        if let Some(last) = buffer.last.take()
            && let Err(failed) = self.runtime.reach(&last)
        {
            // Nobody may have it again.
            return Err(failed);
        }
        // SAFETY: `buffer` is memory of its own, as long as that, and no copy uses it.
        fill(unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(buffer.at), bytes) });
        // SAFETY: as the caller promises.
        match unsafe { self.queue_return(&buffer, bytes, to, at) } {
            Ok(returning) => {
                buffer.last = Some(returning.arrived.clone());
                self.lock().put(buffer);
                Ok(returning)
            }
            // The copy may be under way: the buffer is leaked.
            Err(failed) => Err(failed),
        }
    }

    /// Sees to it that `count` buffers of `bytes` are idle, so that one is filled while the others are copied.
    pub(crate) fn reserve(&self, bytes: usize, count: usize) -> Result<(), Failed> {
        let mut pool = self.lock();
        let taken: Vec<_> = (0..count).map(|_| pool.take(&self.runtime, bytes)).collect();
        let mut result = Ok(());
        for buffer in taken {
            match buffer {
                Ok(buffer) => pool.put(buffer),
                Err(failed) => result = Err(failed),
            }
        }
        result
    }

    /// # Safety
    /// As [`Leaving::back`]; `buffer` holds the bytes, at the latest when all is done that is queued for the kernels
    /// now.
    unsafe fn queue_return<T>(
        self: &Arc<Self>,
        buffer: &Buffer<R>,
        bytes: usize,
        to: T,
        at: usize,
    ) -> Result<Returning<R, T>, Failed> {
        let queued = || {
            let free = self.runtime.record(Stream::Compute)?;
            self.runtime.wait(Stream::ToDevice, &free)?;
            // SAFETY: the stream waits until the memory is free and the buffer full, and both are held until the copy
            // is done, or the streams wait for it.
            unsafe { self.runtime.copy(Stream::ToDevice, at, buffer.at, bytes)? };
            self.runtime.record(Stream::ToDevice)
        };
        match queued() {
            Ok(arrived) => Ok(Returning { lines: self.clone(), arrived: Arc::new(arrived), tensor: Some(to) }),
            Err(failed) => {
                if self.runtime.drain(Stream::ToDevice).is_err() {
                    mem::forget(to);
                }
                Err(failed)
            }
        }
    }

    /// A poisoned lock is taken anyway: a buffer that a panic lost is only lost.
    fn lock(&self) -> MutexGuard<'_, Pool<R>> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: Runtime> Drop for Lines<R> {
    fn drop(&mut self) {
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Memory that cannot be waited for is leaked.
        let _ = pool.shrink(&self.runtime, 0);
    }
}

impl<R: Runtime, T> Leaving<R, T> {
    /// Gives the source up: kernels that are queued from now on begin after its copy.
    pub(crate) fn release(&mut self) -> Result<(), Failed> {
        if self.source.is_some() {
            self.lines.runtime.wait(Stream::Compute, &self.left)?;
            self.source = None;
        }
        Ok(())
    }

    /// Sends it back to the GPU. `to` keeps memory for it at `at`, which was taken before this call.
    ///
    /// # Safety
    /// That memory is as large, on this GPU, and nothing that is queued later uses it before [`Returning::take`].
    pub(crate) unsafe fn back<U>(&mut self, to: U, at: usize) -> Result<Returning<R, U>, Failed> {
        self.release()?;
        let Some(buffer) = &mut self.buffer else {
            return Err(Failed { call: "a copy to the GPU", reason: "its buffer is gone".into() });
        };
        // SAFETY: as the caller promises; the kernels wait for `left`, and so for the full buffer, or this thread has.
        let returning = unsafe { self.lines.queue_return(buffer, self.bytes, to, at)? };
        buffer.last = Some(returning.arrived.clone());
        Ok(returning)
    }

    /// Its bytes, when it has left: this thread waits for that.
    pub(crate) fn bytes(&mut self) -> Result<&[u8], Failed> {
        self.lines.runtime.reach(&self.left)?;
        self.source = None;
        let Some(buffer) = &self.buffer else { return Ok(&[]) };
        // SAFETY: the buffer is this one's alone, as long as that, and written.
        Ok(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(buffer.at), self.bytes) })
    }
}

impl<R: Runtime, T> Drop for Leaving<R, T> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if self.release().is_err() && self.lines.runtime.drain(Stream::ToHost).is_err() {
            mem::forget(self.source.take());
            return;
        }
        self.lines.lock().put(buffer);
    }
}

impl<R: Runtime, T> Returning<R, T> {
    /// The tensor; kernels that are queued from now on find it complete.
    pub(crate) fn take(mut self) -> Result<T, Failed> {
        self.lines.runtime.wait(Stream::Compute, &self.arrived)?;
        self.tensor.take().ok_or(Failed { call: "a copy to the GPU", reason: "it was taken before".into() })
    }
}

impl<R: Runtime, T> Drop for Returning<R, T> {
    fn drop(&mut self) {
        let Some(tensor) = self.tensor.take() else { return };
        let runtime = &self.lines.runtime;
        if runtime.wait(Stream::Compute, &self.arrived).is_err() && runtime.drain(Stream::ToDevice).is_err() {
            mem::forget(tensor);
        }
    }
}
