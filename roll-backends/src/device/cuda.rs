//! Whether CubeCL can run on a GPU here.

use std::ffi::c_int;

use libloading::Library;

const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
const NVRTC: [&str; 5] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so.11"];
/// What the kernels include.
const HEADER: &str = "cuda_fp16.h";

/// What is missing to run kernels on device `number`: the driver, a device, the compiler, its headers.
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
        return Err("CUDA's run-time compiler is not found: install it (libnvrtc.so, in the CUDA toolkit or the PyPI \
                    package nvidia-cuda-nvrtc-cu12), with its directory in LD_LIBRARY_PATH"
            .into());
    }
    match cubecl::cuda::install::cuda_path() {
        Some(path) if path.join("include").join(HEADER).exists() => Ok(()),
        found => Err(format!(
            "CUDA's headers are not found ({HEADER} in {}): install the CUDA toolkit and set CUDA_PATH to the directory \
             that holds `include`",
            found.map_or("/usr/local/cuda/include".into(), |path| path.join("include").display().to_string())
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
