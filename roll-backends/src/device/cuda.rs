//! The CUDA device of CubeCL: availability checks and configuration.

mod compiler;

use std::ffi::c_int;

use cubecl::config::memory::CudaAllocator;
use libloading::Library;

use super::memory::DRIVER;
use crate::library::{functions, open_first};

/// Fails, with the name of the missing part, unless device `number` can run kernels. Checks the driver, the device,
/// NVRTC and its headers.
pub fn check_usable(number: usize) -> Result<(), String> {
    let (driver, _) = open_first(&DRIVER).map_err(|_| {
        let names = DRIVER.join(" or ");
        format!("NVIDIA's driver is not installed: {names} is not found (`nvidia-smi` lists the GPUs where it is)")
    })?;
    let (count, newest_cuda) = devices(driver)?;
    if number >= count {
        return Err(super::no_such_device(number, count));
    }
    compiler::check_usable(newest_cuda)
}

/// Configures CubeCL for CUDA. Must be called before the first device is opened.
pub fn set_up() {
    super::cube::set_up(|config| {
        // `cudaMallocAsync`: memory is allocated and freed in stream order, without a synchronisation.
        config.memory.cuda.allocator = CudaAllocator::Async;
        // CubeCL gives every thread a stream with memory pools of its own. Copies run on threads of their own, whose
        // streams would hold further pools without a limit.
        config.streaming.max_streams = STREAMS;
    });
}

/// Limit of CubeCL's streams: one for kernels, the others for copies.
const STREAMS: u8 = 4;

functions! {
    Driver {
        init: "cuInit" (u32) -> c_int,
        count: "cuDeviceGetCount" (*mut c_int) -> c_int,
        version: "cuDriverGetVersion" (*mut c_int) -> c_int,
    }
}

/// `CUDA_SUCCESS`.
const SUCCESS: c_int = 0;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: c_int = 100;
/// The only value that `cuInit` accepts.
const NO_FLAGS: u32 = 0;

/// The number of devices that the driver reports, and the newest CUDA that it supports: 12040 is 12.4.
fn devices(driver: Library) -> Result<(usize, c_int), String> {
    let broken = |what: &str| format!("NVIDIA's driver does not work: {what} (does `nvidia-smi` list the GPUs?)");
    let driver = Driver::find(driver).map_err(|missing| broken(&String::from(missing)))?;
    let (mut count, mut version): (c_int, c_int) = (0, 0);
    // SAFETY: the numbers outlive the calls.
    let code = unsafe {
        let mut code = (driver.init)(NO_FLAGS);
        if code == SUCCESS {
            code = (driver.count)(&mut count);
        }
        if code == SUCCESS {
            code = (driver.version)(&mut version);
        }
        code
    };
    match code {
        SUCCESS => Ok((usize::try_from(count).unwrap_or(0), version)),
        NO_DEVICE => Ok((0, version)),
        code => Err(broken(&format!("it answers with error {code}"))),
    }
}
