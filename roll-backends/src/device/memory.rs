//! Memory sizes: of GPUs, as the driver or `nvidia-smi` reports them, and of this process.

use std::ffi::{c_int, c_uint, c_void};
use std::process::Command;

use super::{Backend, parse};
use crate::library::{functions, open_first};

/// Bytes of the memory of the GPU that `backend` names; `None` if it is not an NVIDIA GPU, or neither the driver nor
/// `nvidia-smi` answers.
pub fn total(backend: &str) -> Option<u64> {
    let (kind, number) = parse(backend).ok()?;
    if !matches!(kind, Backend::LibTorchCuda | Backend::Cuda) {
        return None;
    }
    let from_driver = || Driver::open(&DRIVER)?.total(number);
    from_driver().or_else(|| query_nvidia_smi("memory.total", number))
}

/// Bytes that all processes together use on an NVIDIA GPU; `number` is its index among the GPUs that this process
/// sees. `None` if neither `nvidia-smi` nor the driver answers. `nvidia-smi` is queried first, because the driver
/// answers only in a CUDA context, which takes memory itself.
pub fn used(number: usize) -> Option<u64> {
    query_nvidia_smi("memory.used", number).or_else(|| Driver::open(&DRIVER)?.used(number))
}

/// File names of NVIDIA's driver library. A container with the driver capability `compute` alone has it without
/// `nvidia-smi`.
pub const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// `CUDA_SUCCESS`.
const SUCCESS: c_int = 0;
/// The only value that `cuInit` accepts.
const NO_FLAGS: c_uint = 0;

functions! {
    /// NVIDIA's driver. It numbers GPUs as CUDA_VISIBLE_DEVICES does.
    Driver {
        init: "cuInit" (c_uint) -> c_int,
        device: "cuDeviceGet" (*mut c_int, c_int) -> c_int,
        total: "cuDeviceTotalMem_v2" (*mut usize, c_int) -> c_int,
        retain: "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int) -> c_int,
        push: "cuCtxPushCurrent_v2" (*mut c_void) -> c_int,
        pop: "cuCtxPopCurrent_v2" (*mut *mut c_void) -> c_int,
        info: "cuMemGetInfo_v2" (*mut usize, *mut usize) -> c_int,
    }
}

impl Driver {
    fn open(names: &[&str]) -> Option<Self> {
        let (library, _) = open_first(names).ok()?;
        let driver = Self::find(library).ok()?;
        // SAFETY: the driver may be initialised repeatedly.
        (unsafe { (driver.init)(NO_FLAGS) } == SUCCESS).then_some(driver)
    }

    /// The driver's handle of a GPU.
    fn device(&self, number: usize) -> Option<c_int> {
        let (mut device, number) = (0, c_int::try_from(number).ok()?);
        // SAFETY: `device` outlives the call.
        (unsafe { (self.device)(&mut device, number) } == SUCCESS).then_some(device)
    }

    fn total(&self, number: usize) -> Option<u64> {
        let (mut bytes, device) = (0, self.device(number)?);
        // SAFETY: `bytes` outlives the call.
        (unsafe { (self.total)(&mut bytes, device) } == SUCCESS).then_some(bytes as u64)
    }

    /// Queries in the primary context, in which libtorch and CubeCL compute; it is created if necessary, and kept.
    fn used(&self, number: usize) -> Option<u64> {
        let device = self.device(number)?;
        let mut context = std::ptr::null_mut();
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current during the query only.
        let code = unsafe {
            if (self.retain)(&mut context, device) != SUCCESS || (self.push)(context) != SUCCESS {
                return None;
            }
            let code = (self.info)(&mut free, &mut total);
            (self.pop)(&mut context);
            code
        };
        (code == SUCCESS).then_some(total.saturating_sub(free) as u64)
    }
}

/// Bytes of the memory figure `what` of a GPU, as `nvidia-smi` reports it. `nvidia-smi` numbers all GPUs of the
/// machine, whereas `number` is an index into CUDA_VISIBLE_DEVICES and is looked up there.
fn query_nvidia_smi(what: &str, number: usize) -> Option<u64> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let id = if visible.is_empty() { number.to_string() } else { visible.split(',').nth(number)?.trim().to_string() };
    let arguments = [&format!("--query-gpu={what}"), "--format=csv,noheader,nounits", "--id", &id];
    let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
    let mebibytes: u64 = String::from_utf8(output.stdout).ok()?.trim().parse().ok()?;
    Some(mebibytes << 20)
}

/// Peak resident memory of this process in bytes, mapped files included (`VmHWM` of `/proc/self/status`). `None` on
/// systems without this counter.
pub fn host_peak() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{Driver, host_peak};

    /// A driver of one GPU of 150 GB, of which 1 GB is free in a context that is current.
    const FAKE_DRIVER: &str = "#include <stddef.h>
        static int current;
        int cuInit(unsigned flags) { return flags; }
        int cuDeviceGet(int *device, int number) { *device = 7; return number ? 101 : 0; }
        int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 150000000000; return device != 7; }
        int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &current; return device != 7; }
        int cuCtxPushCurrent_v2(void *context) { *(int *)context = 1; return 0; }
        int cuCtxPopCurrent_v2(void **context) { current = 0; return 0; }
        int cuMemGetInfo_v2(size_t *free, size_t *total) {
            *free = 1000000000; *total = 150000000000; return current ? 0 : 201;
        }";

    #[test]
    fn the_driver_reports_gpu_memory_without_nvidia_smi() {
        let directory = tempfile::tempdir().unwrap();
        let [source, library] = ["driver.c", "libcuda.so.1"].map(|name| directory.path().join(name));
        std::fs::write(&source, FAKE_DRIVER).unwrap();
        let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        if !compiled.is_ok_and(|status| status.success()) {
            roll_testing::skip!("there is no C compiler", needs = "cc");
        }
        let driver = Driver::open(&["no such library", library.to_str().unwrap()]).unwrap();
        assert_eq!((driver.total(0), driver.used(0)), (Some(150_000_000_000), Some(149_000_000_000)));
        assert_eq!((driver.total(1), driver.used(1)), (None, None));
    }

    #[test]
    fn the_peak_includes_freed_memory() {
        if host_peak().is_none() {
            roll_testing::skip!("this system has no counter of the memory's peak");
        }
        const HELD: usize = 64 << 20;
        let held = vec![1u8; HELD];
        assert!(held.iter().all(|byte| *byte == 1));
        drop(held);
        // The kernel adds up its counters per processor now and then: the sum lags behind.
        assert!(host_peak().is_some_and(|peak| peak >= HELD as u64 * 3 / 4));
    }
}
