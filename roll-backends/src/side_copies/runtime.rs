//! The calls of a GPU's runtime that copies need.

/// A queue of work on a GPU. Work of one stream is done in order, that of two in any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stream {
    /// That of all kernels. Nothing of it waits for the others by itself.
    Compute,
    /// Copies from the GPU to the host.
    ToHost,
    /// Copies from the host to the GPU.
    ToDevice,
}

/// A call of the runtime that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {reason}")]
pub(crate) struct Failed {
    pub(crate) call: &'static str,
    pub(crate) reason: String,
}

/// The calls, for one GPU. All but the last three return before what they queue is done.
///
/// Addresses are numbers: nothing of this process reads behind those of the GPU.
pub(crate) trait Runtime: Send + Sync + 'static {
    /// A mark in a stream, reached when all is done that was queued there before it. Dropping it frees it, and takes
    /// nothing back.
    type Event: Send + Sync;

    /// A mark at the end of `stream` as it is now.
    fn record(&self, stream: Stream) -> Result<Self::Event, Failed>;

    /// Work that is queued in `stream` from now on begins after `event`.
    fn wait(&self, stream: Stream, event: &Self::Event) -> Result<(), Failed>;

    /// Queues a copy of `bytes` in a stream for copies, in its direction.
    ///
    /// # Safety
    /// Both sides stay allocated until it is done, one of them on the GPU and one from [`Runtime::pin`]; until then
    /// nothing writes `from`, and nothing reads or writes `to`.
    unsafe fn copy(&self, stream: Stream, to: usize, from: usize, bytes: usize) -> Result<(), Failed>;

    /// Waits, in this thread, for `event`.
    fn reach(&self, event: &Self::Event) -> Result<(), Failed>;

    /// Waits, in this thread, until all work in `stream` is done.
    fn drain(&self, stream: Stream) -> Result<(), Failed>;

    /// Page-locked host memory, of exactly this size. Slow: some tenths of a second per GB.
    fn pin(&self, bytes: usize) -> Result<usize, Failed>;

    /// Gives memory of [`Runtime::pin`] back.
    ///
    /// # Safety
    /// Nothing uses it any more, no copy that is queued either.
    unsafe fn unpin(&self, at: usize, bytes: usize);
}
