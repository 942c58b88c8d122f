//! Whether CubeCL can run on a GPU here.

use std::ffi::c_int;

use libloading::Library;

const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// The names that cudarc tries, which panics where it finds no library (`.cargo/config.toml` says for which version).
const NVRTC: [&str; 2] = ["libnvrtc.so", "libnvrtc.so.12"];
/// The headers that the kernels include. The second, for tensor cores, comes with another part of the toolkit.
const HEADERS: [&str; 2] = ["cuda_fp16.h", "crt/mma.h"];

/// Fails with what is missing to run kernels on device `number`: the driver, a device, the compiler, its headers.
pub fn usable(number: usize) -> Result<(), String> {
    let driver = find(&DRIVER).ok_or_else(|| {
        let names = DRIVER.join(" or ");
        format!("NVIDIA's driver is not installed: {names} is not found (`nvidia-smi` lists the GPUs where it is)")
    })?;
    match devices(&driver)? {
        count if number < count => {}
        count => return Err(super::too_few(number, count)),
    }
    if find(&NVRTC).is_none() {
        return Err("CUDA's run-time compiler is not found (libnvrtc.so or libnvrtc.so.12): `scripts/setup-cuda` fetches it, or \
                    install the CUDA toolkit, with its libraries in LD_LIBRARY_PATH"
            .into());
    }
    let path = cubecl::cuda::install::cuda_path().unwrap_or_else(|| "/usr/local/cuda".into()).join("include");
    match HEADERS.into_iter().find(|header| !path.join(header).exists()) {
        None => Ok(()),
        Some(header) => Err(format!(
            "CUDA's headers are not found ({header} in {}): `scripts/setup-cuda` fetches them, or install the CUDA toolkit \
             and set CUDA_PATH to the directory that holds `include`",
            path.display()
        )),
    }
}

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
