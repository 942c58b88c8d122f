//! Runs a whole pass inside rayon's thread pool.

use burn_tensor::Device;
use roll_backends::device::is_flex;

/// Calls `f` and returns its result. On the backend `flex`, `f` runs on a thread of rayon's pool. A pass has hundreds
/// of short parallel loops. Inside the pool each loop begins at once; outside, each would wait until a pool thread
/// wakes, and then until the caller wakes. For networks of small pictures these waits are most of the time.
pub(super) fn run_in_pool<T: Send>(device: &Device, f: impl FnOnce() -> T + Send) -> T {
    if is_flex(device) { rayon::scope(|_| f()) } else { f() }
}
