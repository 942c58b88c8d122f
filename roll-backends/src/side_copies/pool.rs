//! Page-locked memory that is used again and again.

use std::sync::Arc;

use super::runtime::{Failed, Runtime, Stream};

/// Page-locked host memory.
pub(super) struct Buffer<R: Runtime> {
    pub(super) at: usize,
    pub(super) capacity: usize,
    /// Behind the last copy from or to it: the next owner of the buffer waits for it, on a stream or on the host.
    pub(super) last: Option<Arc<R::Event>>,
}

/// Buffers that nobody uses. All together, used or not, take little more than were ever used at once.
pub(super) struct Pool<R: Runtime> {
    /// Those that were given back first stand first: their last copies are done first.
    idle: Vec<Buffer<R>>,
    pinned: usize,
    used: usize,
    most: usize,
    /// Bytes that may be pinned above `most`.
    spare: usize,
}

impl<R: Runtime> Pool<R> {
    pub(super) fn new(spare: usize) -> Self {
        Self { idle: Vec::new(), pinned: 0, used: 0, most: 0, spare }
    }

    /// A buffer of `bytes`, or of up to twice as many where one is idle.
    pub(super) fn take(&mut self, runtime: &R, bytes: usize) -> Result<Buffer<R>, Failed> {
        let bytes = bytes.max(1);
        let fits = |buffer: &Buffer<R>| (bytes..=bytes.saturating_mul(2)).contains(&buffer.capacity);
        let best = (0..self.idle.len()).filter(|i| fits(&self.idle[*i])).min_by_key(|i| self.idle[*i].capacity);
        if let Some(best) = best {
            let buffer = self.idle.remove(best);
            self.used += buffer.capacity;
            self.most = self.most.max(self.used);
            return Ok(buffer);
        }
        let room = self.most.max(self.used + bytes);
        self.shrink(runtime, (room + self.spare).saturating_sub(bytes))?;
        let at = match runtime.pin(bytes) {
            Ok(at) => at,
            Err(_) => {
                // Idle buffers may hold the memory that is missing.
                self.shrink(runtime, 0)?;
                runtime.pin(bytes)?
            }
        };
        self.pinned += bytes;
        self.used += bytes;
        self.most = room;
        Ok(Buffer { at, capacity: bytes, last: None })
    }

    pub(super) fn put(&mut self, buffer: Buffer<R>) {
        self.used -= buffer.capacity;
        self.idle.push(buffer);
    }

    /// Frees idle buffers until at most `bytes` are pinned, or none is idle.
    pub(super) fn shrink(&mut self, runtime: &R, bytes: usize) -> Result<(), Failed> {
        if self.pinned <= bytes || self.idle.is_empty() {
            return Ok(());
        }
        // Copies of the others are few when something is freed, and it happens once per kind of sample.
        runtime.drain(Stream::ToHost)?;
        runtime.drain(Stream::ToDevice)?;
        while self.pinned > bytes && !self.idle.is_empty() {
            let Buffer { at, capacity, .. } = self.idle.remove(0);
            // SAFETY: it is idle, and all copies are done.
            unsafe { runtime.unpin(at, capacity) };
            self.pinned -= capacity;
        }
        Ok(())
    }
}

#[cfg(test)]
impl<R: Runtime> Pool<R> {
    /// Bytes of all buffers, and of those in use.
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.pinned, self.used]
    }
}
