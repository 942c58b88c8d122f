//! Checks that NVRTC, CUDA's run-time compiler, works the way CubeCL will call it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use libloading::Library;

use crate::library::{first, functions};

/// The file names that cudarc looks for (`.cargo/config.toml` sets the version). cudarc panics if it finds no such
/// file.
const KNOWN: [&str; 3] = ["libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.11"];
/// File names that cudarc does not look for, although these versions would work under one of the names above.
const OTHERS: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.14"];
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

/// Fails with the name of a missing library or header, or with NVRTC's log of a trial kernel. The check runs once per
/// process.
pub fn usable() -> Result<(), String> {
    static FOUND: OnceLock<Result<(), String>> = OnceLock::new();
    FOUND.get_or_init(tried).clone()
}

fn tried() -> Result<(), String> {
    let Ok((library, _)) = first(&KNOWN) else { return Err(missing()) };
    let path = cubecl::cuda::install::cuda_path().unwrap_or_else(|| "/usr/local/cuda".into()).join("include");
    if let Some(header) = HEADERS.into_iter().find(|header| !path.join(header).exists()) {
        return Err(format!(
            "CUDA's headers are not found ({header} in {}): `scripts/setup-cuda` fetches them, or install the CUDA toolkit \
             and set CUDA_PATH to the directory that holds `include`",
            path.display()
        ));
    }
    compiled(library, &path).map_err(|problem| {
        format!(
            "CUDA's run-time compiler does not work with the headers in {}: {} (its libraries, libnvrtc-builtins too, \
             belong in LD_LIBRARY_PATH; `eval \"$(scripts/setup-cuda)\"` sets that up)",
            path.display(),
            problem.split_whitespace().collect::<Vec<_>>().join(" ")
        )
    })
}

fn missing() -> String {
    let names = KNOWN.join(" or ");
    match OTHERS.into_iter().find(|name| first(&[*name]).is_ok()) {
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
        create: "nvrtcCreateProgram" (*mut Program, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int,
        compile: "nvrtcCompileProgram" (Program, c_int, Strings) -> c_int,
        log_size: "nvrtcGetProgramLogSize" (Program, *mut usize) -> c_int,
        log: "nvrtcGetProgramLog" (Program, *mut c_char) -> c_int,
        destroy: "nvrtcDestroyProgram" (*mut Program) -> c_int,
    }
}

/// Compiles the trial kernel; fails with the first lines of NVRTC's log.
fn compiled(library: Library, headers: &Path) -> Result<(), String> {
    let include = CString::new(format!("--include-path={}", headers.display()))
        .map_err(|_| "its path has a zero byte".to_string())?;
    let nvrtc = Nvrtc::find(library).map_err(|missing| format!("it is another library: {}", String::from(missing)))?;
    let mut program = null_mut();
    // SAFETY: strings outlive the calls; no headers are given.
    match unsafe { (nvrtc.create)(&mut program, TRIAL.as_ptr(), null(), 0, null(), null()) } {
        0 => {}
        code => return Err(format!("it answers with error {code}")),
    }
    let options = [ARCHITECTURE.as_ptr(), include.as_ptr()];
    let (mut log, mut size) = (Vec::new(), 0);
    // SAFETY: the program was created above and is destroyed last; the log has the size that the library reported.
    let code = unsafe {
        let code = (nvrtc.compile)(program, options.len() as c_int, options.as_ptr());
        if code != 0 && (nvrtc.log_size)(program, &mut size) == 0 {
            log = vec![0u8; size.max(1)];
            (nvrtc.log)(program, log.as_mut_ptr().cast());
        }
        (nvrtc.destroy)(&mut program);
        code
    };
    if code == 0 {
        return Ok(());
    }
    let text = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
    Err(format!("error {code}: {}", text.lines().take(4).collect::<Vec<_>>().join(" ")))
}
