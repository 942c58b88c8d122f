//! A pool of pinned host memory.

use std::sync::Arc;

use super::runtime::{Runtime, RuntimeError, Stream};

/// A buffer of pinned host memory.
pub(super) struct Buffer<R: Runtime> {
    /// The address.
    pub(super) at: usize,
    /// Bytes of the buffer.
    pub(super) capacity: usize,
    /// The event after the last copy from or to the buffer; the next user waits for it, on a stream or on the host.
    pub(super) last_copy: Option<Arc<R::Event>>,
}

/// The pool's idle buffers. Idle and used buffers together take at most `spare` bytes more than the peak use.
pub(super) struct Pool<R: Runtime> {
    /// Idle buffers in the order in which they were returned, which is the order in which their last copies finish.
    idle: Vec<Buffer<R>>,
    /// Bytes of all buffers.
    pinned: usize,
    /// Bytes of the buffers in use.
    used: usize,
    /// The largest `used` so far.
    peak: usize,
    /// Bytes that may be pinned in addition to `peak`.
    spare: usize,
}

impl<R: Runtime> Pool<R> {
    pub(super) fn new(spare: usize) -> Self {
        Self { idle: Vec::new(), pinned: 0, used: 0, peak: 0, spare }
    }

    /// Returns the smallest idle buffer of at least `bytes` and at most twice as many, or else a new one of `bytes`.
    pub(super) fn take(&mut self, runtime: &R, bytes: usize) -> Result<Buffer<R>, RuntimeError> {
        let bytes = bytes.max(1);
        let is_fitting = |buffer: &Buffer<R>| (bytes..=bytes.saturating_mul(2)).contains(&buffer.capacity);
        let fitting = (0..self.idle.len()).filter(|i| is_fitting(&self.idle[*i]));
        let smallest = fitting.min_by_key(|i| self.idle[*i].capacity);
        if let Some(index) = smallest {
            let buffer = self.idle.remove(index);
            self.used += buffer.capacity;
            self.peak = self.peak.max(self.used);
            return Ok(buffer);
        }
        let new_peak = self.peak.max(self.used + bytes);
        self.shrink(runtime, (new_peak + self.spare).saturating_sub(bytes))?;
        let at = match runtime.pin(bytes) {
            Ok(at) => at,
            Err(_) => {
                // Idle buffers may occupy the memory that is missing.
                self.shrink(runtime, 0)?;
                runtime.pin(bytes)?
            }
        };
        self.pinned += bytes;
        self.used += bytes;
        self.peak = new_peak;
        Ok(Buffer { at, capacity: bytes, last_copy: None })
    }

    /// Takes a buffer back.
    pub(super) fn put(&mut self, buffer: Buffer<R>) {
        self.used -= buffer.capacity;
        self.idle.push(buffer);
    }

    /// Frees idle buffers until at most `max_pinned` bytes are pinned or no buffer is idle.
    pub(super) fn shrink(&mut self, runtime: &R, max_pinned: usize) -> Result<(), RuntimeError> {
        if self.pinned <= max_pinned || self.idle.is_empty() {
            return Ok(());
        }
        // Waiting for both streams is acceptable, because little is in flight then, and the pool only shrinks when
        // samples of another size come.
        runtime.synchronize_stream(Stream::ToHost)?;
        runtime.synchronize_stream(Stream::ToDevice)?;
        while self.pinned > max_pinned && !self.idle.is_empty() {
            let Buffer { at, capacity, .. } = self.idle.remove(0);
            // SAFETY: the buffer is idle, and all copies have finished.
            unsafe { runtime.unpin(at, capacity) };
            self.pinned -= capacity;
        }
        Ok(())
    }
}

#[cfg(test)]
impl<R: Runtime> Pool<R> {
    /// Bytes of all buffers and of the buffers in use.
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.pinned, self.used]
    }
}
