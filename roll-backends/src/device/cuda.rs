//! Whether CubeCL can run on a GPU here, and how it is set up.

mod compiler;

use std::ffi::c_int;

use cubecl::config::memory::CudaAllocator;
use libloading::Library;

const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Fails with the missing part to run kernels on device `number`: the driver, a device, the compiler, its headers.
pub fn usable(number: usize) -> Result<(), String> {
    let driver = find(&DRIVER).ok_or_else(|| {
        let names = DRIVER.join(" or ");
        format!("NVIDIA's driver is not installed: {names} is not found (`nvidia-smi` lists the GPUs where it is)")
    })?;
    match devices(&driver)? {
        count if number < count => {}
        count => return Err(super::too_few(number, count)),
    }
    compiler::usable()
}

/// Before the first device.
pub fn set_up() {
    super::cube::set_up(|config| {
        // Memory is taken and given back in the order of the work, without waiting for the GPU.
        config.memory.cuda.allocator = CudaAllocator::Async;
        // Each thread has a stream with memory of its own, and copies run on threads of their own: many streams would
        // keep many copies of the memory.
        config.streaming.max_streams = STREAMS;
    });
}

/// One that computes and some that copy.
const STREAMS: u8 = 4;

fn find(names: &[&str]) -> Option<Library> {
    // SAFETY: these libraries do nothing when they are loaded but set themselves up.
    names.iter().find_map(|name| unsafe { Library::new(*name) }.ok())
}

/// How many devices the driver has.
fn devices(driver: &Library) -> Result<usize, String> {
    let broken = |what: &str| format!("NVIDIA's driver does not work: {what} (does `nvidia-smi` list the GPUs?)");
    let mut count: c_int = 0;
    // SAFETY: the signatures are those of `cuda.h`, and the library stays open meanwhile.
    let code = unsafe {
        let init = driver.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit\0").map_err(|e| broken(&e.to_string()))?;
        let get = driver
            .get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"cuDeviceGetCount\0")
            .map_err(|e| broken(&e.to_string()))?;
        match init(0) {
            0 => get(&mut count),
            code => code,
        }
    };
    match code {
        0 => Ok(usize::try_from(count).unwrap_or(0)),
        // CUDA_ERROR_NO_DEVICE.
        100 => Ok(0),
        code => Err(broken(&format!("it answers with error {code}"))),
    }
}
