//! Where a whole pass runs.

use burn::tensor::Device;

/// What `f` gives. On the CPU's own backend `f` runs on a thread of rayon's pool. A pass is hundreds of short loops that
/// the pool divides: from within, each begins at once; from outside, each would wait until a thread of the pool wakes, and
/// then until the caller has woken. For networks of small pictures that is most of the time.
pub(super) fn within<T: Send>(device: &Device, f: impl FnOnce() -> T + Send) -> T {
    match roll_backends::device("flex").is_ok_and(|flex| flex == *device) {
        true => rayon::scope(|_| f()),
        false => f(),
    }
}
