//! The GPU runtime calls that copies need, as a trait: `cuda.rs` implements it by the CUDA runtime, tests by a fake
//! that checks the order of accesses.

/// A queue of work on a GPU. Work of one stream runs in order; work of different streams is unordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stream {
    /// The stream of all kernels. It does not wait for the other streams by itself.
    Compute,
    /// Copies from the GPU to the host.
    ToHost,
    /// Copies from the host to the GPU.
    ToDevice,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {reason}")]
pub(crate) struct RuntimeError {
    pub(crate) call: &'static str,
    pub(crate) reason: String,
}

/// The runtime of one GPU. Calls return before the work that they queue is done; only `synchronize_event`,
/// `synchronize_stream` and `pin` block.
///
/// Addresses are numbers, because this process never dereferences addresses of the GPU.
pub(crate) trait Runtime: Send + Sync + 'static {
    /// An event in a stream, reached when all work queued before it is done. Dropping it frees the handle and cancels
    /// nothing.
    type Event: Send + Sync;

    /// Records an event at the current end of `stream`.
    fn record_event(&self, stream: Stream) -> Result<Self::Event, RuntimeError>;

    /// Makes work that is queued in `stream` from now on wait for `event`.
    fn stream_wait_event(&self, stream: Stream, event: &Self::Event) -> Result<(), RuntimeError>;

    /// Queues a copy of `bytes` in a copy stream, in the direction of the stream.
    ///
    /// # Safety
    /// Both memories must stay allocated until the copy is done; one must be on the GPU, the other from
    /// [`Runtime::pin`]. Until then nothing may write `from`, and nothing may read or write `to`.
    unsafe fn copy(&self, stream: Stream, to: usize, from: usize, bytes: usize) -> Result<(), RuntimeError>;

    /// Blocks this thread until `event` is reached.
    fn synchronize_event(&self, event: &Self::Event) -> Result<(), RuntimeError>;

    /// Blocks this thread until all work in `stream` is done.
    fn synchronize_stream(&self, stream: Stream) -> Result<(), RuntimeError>;

    /// Allocates pinned host memory of exactly this size. Slow: some tenths of a second per GB.
    fn pin(&self, bytes: usize) -> Result<usize, RuntimeError>;

    /// Frees memory of [`Runtime::pin`].
    ///
    /// # Safety
    /// Nothing may use the memory any more, including queued copies.
    unsafe fn unpin(&self, at: usize, bytes: usize);
}
