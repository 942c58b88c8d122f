//! Checks that NVRTC, CUDA's run-time compiler, works the way CubeCL will call it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use libloading::Library;

use crate::library::{functions, open_first};

/// The file names that cudarc looks for (`.cargo/config.toml` sets the version). cudarc panics if it finds no such
/// file.
const KNOWN_TO_CUDARC: [&str; 3] = ["libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.11"];
/// File names that cudarc does not look for, although these versions would work under one of the names above.
const UNKNOWN_TO_CUDARC: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.14"];
/// Headers that the kernels include. The last one, for tensor cores, is part of another package of the toolkit.
const HEADERS: [&str; 3] = ["cuda_fp16.h", "cuda_bf16.h", "crt/mma.h"];
/// A trivial kernel that includes the same headers as CubeCL's kernels.
const TRIAL: &CStr = c"#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <mma.h>
extern \"C\" __global__ void trial(float* x) { x[0] = float(__nv_bfloat16(x[0])); }
";
/// Compute capability 8.0, the oldest with bf16: every supported version of NVRTC compiles for it.
const ARCHITECTURE: &CStr = c"--gpu-architecture=compute_80";
/// Maximal number of lines of NVRTC's log in an error.
const LOGGED_LINES: usize = 4;
/// `NVRTC_SUCCESS`.
const SUCCESS: c_int = 0;

/// Fails with the name of a missing library or header, with NVRTC's log of a trial kernel, or if NVRTC is newer than
/// `newest_cuda`, the CUDA that the driver supports (12040 is 12.4). The check runs once per process.
pub fn check_usable(newest_cuda: c_int) -> Result<(), String> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    OUTCOME.get_or_init(|| check(newest_cuda)).clone()
}

fn check(newest_cuda: c_int) -> Result<(), String> {
    let Ok((library, _)) = open_first(&KNOWN_TO_CUDARC) else { return Err(not_found()) };
    let path = cubecl::cuda::install::cuda_path().unwrap_or_else(|| "/usr/local/cuda".into()).join("include");
    if let Some(header) = HEADERS.into_iter().find(|header| !path.join(header).exists()) {
        return Err(format!(
            "CUDA's headers are not found ({header} in {}): `scripts/setup-cuda` fetches them, or install the CUDA toolkit \
             and set CUDA_PATH to the directory that holds `include`",
            path.display()
        ));
    }
    let version = compile_trial(library, &path).map_err(|problem| {
        format!(
            "CUDA's run-time compiler does not work with the headers in {}: {} (its libraries, libnvrtc-builtins too, \
             belong in LD_LIBRARY_PATH; `eval \"$(scripts/setup-cuda)\"` sets that up)",
            path.display(),
            problem.split_whitespace().collect::<Vec<_>>().join(" ")
        )
    })?;
    check_driver(version, newest_cuda)
}

/// Fails if the driver is too old to load the kernels of a compiler of version `major.minor`: a driver refuses PTX of a
/// CUDA newer than `newest_cuda`.
fn check_driver([major, minor]: [c_int; 2], newest_cuda: c_int) -> Result<(), String> {
    // The driver's number of version 12.4 is 12040.
    if major * 1000 + minor * 10 <= newest_cuda {
        return Ok(());
    }
    Err(format!(
        "CUDA's run-time compiler is that of CUDA {major}.{minor}, and NVIDIA's driver loads kernels of CUDA {}.{} and \
         older: `eval \"$(scripts/setup-cuda)\"` fetches an older compiler (12.4), or install a newer driver",
        newest_cuda / 1000,
        newest_cuda % 1000 / 10
    ))
}

/// The error if none of [`KNOWN_TO_CUDARC`] can be loaded.
fn not_found() -> String {
    let names = KNOWN_TO_CUDARC.join(" or ");
    match UNKNOWN_TO_CUDARC.into_iter().find(|name| open_first(&[*name]).is_ok()) {
        Some(name) => format!(
            "CUDA's run-time compiler is here as {name}, and looked for as {names}: `eval \"$(scripts/setup-cuda \
             --installed)\"` gives it that name"
        ),
        None => format!(
            "CUDA's run-time compiler is not found ({names}): `eval \"$(scripts/setup-cuda)\"` fetches it, with \
             `--installed` takes that of an installed toolkit or PyTorch; or set LD_LIBRARY_PATH to the toolkit's libraries"
        ),
    }
}

type Program = *mut c_void;
type Strings = *const *const c_char;

functions! {
    /// Functions of `nvrtc.h`, the same since CUDA 7.
    Nvrtc {
        version: "nvrtcVersion" (*mut c_int, *mut c_int) -> c_int,
        create: "nvrtcCreateProgram" (*mut Program, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int,
        compile: "nvrtcCompileProgram" (Program, c_int, Strings) -> c_int,
        log_size: "nvrtcGetProgramLogSize" (Program, *mut usize) -> c_int,
        log: "nvrtcGetProgramLog" (Program, *mut c_char) -> c_int,
        destroy: "nvrtcDestroyProgram" (*mut Program) -> c_int,
    }
}

/// Compiles the trial kernel and returns NVRTC's version; fails with the first lines of its log.
fn compile_trial(library: Library, headers: &Path) -> Result<[c_int; 2], String> {
    let include = CString::new(format!("--include-path={}", headers.display()))
        .map_err(|_| "its path has a zero byte".to_string())?;
    let nvrtc = Nvrtc::find(library).map_err(|missing| format!("it is another library: {}", String::from(missing)))?;
    let [mut major, mut minor] = [0, 0];
    // SAFETY: the numbers outlive the call.
    match unsafe { (nvrtc.version)(&mut major, &mut minor) } {
        SUCCESS => {}
        code => return Err(format!("it answers with error {code}")),
    }
    const UNNAMED: *const c_char = null();
    const HEADER_COUNT: c_int = 0;
    let mut program = null_mut();
    // SAFETY: strings outlive the calls; no headers are given.
    match unsafe { (nvrtc.create)(&mut program, TRIAL.as_ptr(), UNNAMED, HEADER_COUNT, null(), null()) } {
        SUCCESS => {}
        code => return Err(format!("it answers with error {code}")),
    }
    let options = [ARCHITECTURE.as_ptr(), include.as_ptr()];
    let (mut log, mut size) = (Vec::new(), 0);
    // SAFETY: the program was created above and is destroyed last; the log has the size that the library reported.
    let code = unsafe {
        let code = (nvrtc.compile)(program, options.len() as c_int, options.as_ptr());
        if code != SUCCESS && (nvrtc.log_size)(program, &mut size) == SUCCESS {
            log = vec![0u8; size.max(1)];
            (nvrtc.log)(program, log.as_mut_ptr().cast());
        }
        (nvrtc.destroy)(&mut program);
        code
    };
    if code == SUCCESS {
        return Ok([major, minor]);
    }
    let text = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
    Err(format!("error {code}: {}", text.lines().take(LOGGED_LINES).collect::<Vec<_>>().join(" ")))
}

#[cfg(test)]
mod tests {
    use super::check_driver;

    #[test]
    fn a_compiler_newer_than_the_driver_is_refused_by_both_versions() {
        for (version, newest_cuda) in [([12, 4], 12_040), ([12, 4], 13_000), ([11, 8], 12_000), ([13, 0], 13_000)] {
            assert_eq!(check_driver(version, newest_cuda), Ok(()), "{version:?} {newest_cuda}");
        }
        for (version, newest_cuda, named) in [
            ([13, 2], 13_000, ["CUDA 13.2,", "CUDA 13.0 and", "setup-cuda"]),
            ([12, 8], 12_040, ["CUDA 12.8,", "CUDA 12.4 and", "setup-cuda"]),
            ([13, 0], 12_090, ["CUDA 13.0,", "CUDA 12.9 and", "setup-cuda"]),
        ] {
            let refused = check_driver(version, newest_cuda).err().unwrap_or_default();
            named.iter().for_each(|named| assert!(refused.contains(named), "{refused}: {named}"));
        }
    }
}
