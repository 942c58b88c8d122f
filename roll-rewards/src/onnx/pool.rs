//! The thread pool around a whole pass.

use burn::tensor::Device;
use roll_backends::device::is_flex;

/// The result of `f`. On the CPU's own backend `f` runs on a thread of rayon's pool. A pass is hundreds of short loops that
/// the pool divides: from within, each begins at once; from outside, each would wait until a thread of the pool wakes, and
/// then until the caller has woken. For networks of small pictures that is most of the time.
pub(super) fn within<T: Send>(device: &Device, f: impl FnOnce() -> T + Send) -> T {
    match is_flex(device) {
        true => rayon::scope(|_| f()),
        false => f(),
    }
}
