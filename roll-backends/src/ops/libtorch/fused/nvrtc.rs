//! NVRTC, CUDA's run-time compiler: finds the library and compiles the kernels for one GPU architecture.
//!
//! The declarations follow `nvrtc.h`, whose functions are the same in CUDA 11.2 to 13. The crate `cudarc` declares them
//! too, but it looks for the library by name only and panics without it; torch's wheels keep the library in a folder
//! that no loader searches.

use std::collections::BTreeSet;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use crate::library::{functions, open, text};

/// The source of all kernels.
pub(super) const SOURCE: &str =
    concat!(include_str!("kernels.cu"), "\n", include_str!("channel_norm.cu"), "\n", include_str!("adam.cu"));

/// Names for the system's loader, if torch's folders have none. Newest first: an old one does not know new GPUs.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// Libraries whose folder, or a neighbouring folder, contains the compiler.
const CUDA_LIBRARIES: [&str; 5] = ["libnvrtc.", "libcudart", "libtorch_cuda", "libc10_cuda", "libcublas"];

/// `NVRTC_SUCCESS`.
const SUCCESS: c_int = 0;

type Program = *mut c_void;
type Strings = *const *const c_char;

functions! {
    /// Functions of `nvrtc.h`.
    Functions {
        create: "nvrtcCreateProgram" (*mut Program, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int,
        compile: "nvrtcCompileProgram" (Program, c_int, Strings) -> c_int,
        destroy: "nvrtcDestroyProgram" (*mut Program) -> c_int,
        code_size: "nvrtcGetCUBINSize" (Program, *mut usize) -> c_int,
        code: "nvrtcGetCUBIN" (Program, *mut c_char) -> c_int,
        ptx_size: "nvrtcGetPTXSize" (Program, *mut usize) -> c_int,
        ptx: "nvrtcGetPTX" (Program, *mut c_char) -> c_int,
        log_size: "nvrtcGetProgramLogSize" (Program, *mut usize) -> c_int,
        log: "nvrtcGetProgramLog" (Program, *mut c_char) -> c_int,
        error: "nvrtcGetErrorString" (c_int) -> *const c_char,
    }
}

/// The loaded library.
pub(super) struct Nvrtc {
    functions: Functions,
    file: String,
}

impl Nvrtc {
    /// Loads the NVRTC near torch's libraries, else the one that the system's loader finds. Fails with the reason for
    /// each library that was tried.
    pub(super) fn load() -> Result<Self, String> {
        let nearby = near_loaded();
        let mut reasons = Vec::new();
        for path in nearby.iter().map(PathBuf::as_path).chain(NAMES.map(Path::new)) {
            match Self::open(path) {
                Ok(found) => return Ok(found),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(format!(
            "CUDA's run-time compiler is not found ({}): install `nvidia-cuda-nvrtc` of PyPI in the version of torch's CUDA, or \
             the CUDA toolkit, with its libraries in LD_LIBRARY_PATH",
            reasons.join("; ")
        ))
    }

    /// Loads NVRTC from a path or by name.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        open_builtins(path);
        Ok(Self { functions: Functions::find(open(path)?)?, file: path.display().to_string() })
    }

    /// Compiles `source` for an architecture. `sm_90` and the like result in machine code (CUBIN), which loads in
    /// milliseconds without the driver's compiler; `compute_90` and the like in PTX, which other tools read. Fails with
    /// NVRTC's log.
    pub(super) fn compile(&self, source: &str, architecture: &str) -> Result<Vec<u8>, String> {
        let source = CString::new(source).map_err(|_| "the source of the kernels has a zero byte".to_string())?;
        let option = CString::new(format!("--gpu-architecture={architecture}")).map_err(|e| e.to_string())?;
        let options = [option.as_ptr(), c"--std=c++17".as_ptr()];
        const HEADER_COUNT: c_int = 0;
        let mut program = null_mut();
        // SAFETY: strings end with a zero byte and outlive the call; no headers are given.
        let code = unsafe {
            (self.functions.create)(&mut program, source.as_ptr(), c"kernels.cu".as_ptr(), HEADER_COUNT, null(), null())
        };
        self.check("nvrtcCreateProgram", code)?;
        // SAFETY: as above; the number of options matches.
        let compile_code = unsafe { (self.functions.compile)(program, options.len() as c_int, options.as_ptr()) };
        let result = match self.check("nvrtcCompileProgram", compile_code) {
            Ok(()) if architecture.starts_with("sm_") => {
                self.bytes(program, self.functions.code_size, self.functions.code)
            }
            Ok(()) => self.bytes(program, self.functions.ptx_size, self.functions.ptx),
            Err(error) => {
                let log = self.bytes(program, self.functions.log_size, self.functions.log).unwrap_or_default();
                let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
                Err(format!("{error} for {architecture}: {log}"))
            }
        };
        // SAFETY: created above, and not used afterwards.
        unsafe { (self.functions.destroy)(&mut program) };
        result
    }

    /// Returns the bytes that `get` writes; `size` returns their number.
    fn bytes(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut count = 0;
        // SAFETY: the program is alive.
        self.check("nvrtcGet...Size", unsafe { size(program, &mut count) })?;
        let mut bytes = vec![0u8; count];
        // SAFETY: the buffer has the size that the library reported.
        self.check("nvrtcGet...", unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    /// Fails with NVRTC's message unless `code`, which `call` returned, is [`SUCCESS`].
    fn check(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: returns a constant string for every code.
        let text = unsafe { text((self.functions.error)(code)) };
        Err(format!("{call} of {} failed with {code} ({text})", self.file))
    }
}

/// Preloads `libnvrtc-builtins`. NVRTC opens it by its bare name, which the loader does not find in torch's folders,
/// but a library that is already loaded is used.
fn open_builtins(compiler: &Path) {
    let Some(directory) = compiler.parent().filter(|d| !d.as_os_str().is_empty()) else { return };
    for path in files(directory) {
        if name_of(&path).starts_with("libnvrtc-builtins.so")
            && let Ok(library) = open(&path)
        {
            std::mem::forget(library);
        }
    }
}

/// NVRTC libraries in and near the folders of the CUDA libraries that this process has loaded.
fn near_loaded() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    nvrtc_files(&cuda_folders(&maps))
}

/// The folders of CUDA's and torch's libraries in a process's memory map.
fn cuda_folders(maps: &str) -> BTreeSet<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let cuda = paths.filter(|path| CUDA_LIBRARIES.iter().any(|name| name_of(path).starts_with(name)));
    cuda.filter_map(|path| path.parent().map(Path::to_path_buf)).collect()
}

/// NVRTC libraries in `folders`, then in the folders `nvidia/*/lib` of NVIDIA's packages near `folders`.
fn nvrtc_files(folders: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = folders.iter().cloned().collect();
    for folder in folders {
        // From `site-packages/torch/lib`, and from `site-packages/nvidia/PACKAGE/lib`.
        for up in ["../../nvidia", "../.."] {
            let Ok(packages) = folder.join(up).canonicalize() else { continue };
            if packages.ends_with("nvidia") {
                let mut nearby: Vec<_> = files(&packages).into_iter().map(|package| package.join("lib")).collect();
                nearby.sort();
                all.extend(nearby);
            }
        }
    }
    let mut found = Vec::new();
    for folder in all {
        let mut here: Vec<_> = files(&folder).into_iter().filter(|path| is_nvrtc(&name_of(path))).collect();
        here.sort();
        for path in here {
            if !found.contains(&path) {
                found.push(path);
            }
        }
    }
    found
}

/// Whether a file is NVRTC, e.g. `libnvrtc.so.13`, or `libnvrtc-672ee683.so.12` in libtorch's archives. Excludes
/// `libnvrtc-builtins` and the variant for old processors.
fn is_nvrtc(name: &str) -> bool {
    name.starts_with("libnvrtc") && name.contains(".so") && !name.contains("builtins") && !name.contains(".alt.")
}

/// The entries of a directory; none if it cannot be read.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_nvrtc_near_libraries_of_torch_and_cuda() {
        let site = tempfile::tempdir().unwrap();
        let site = site.path().canonicalize().unwrap();
        let make = |folder: &str, names: &[&str]| {
            std::fs::create_dir_all(site.join(folder)).unwrap();
            for name in names {
                std::fs::write(site.join(folder).join(name), "").unwrap();
            }
        };
        make("torch/lib", &["libtorch_cuda.so", "libcaffe2_nvrtc.so"]);
        make(
            "nvidia/cu13/lib",
            &["libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libcudart.so.13"],
        );
        let at = |path: &str| site.join(path).display().to_string();
        let expected = [site.join("nvidia/cu13/lib/libnvrtc.so.13")];
        for library in ["torch/lib/libtorch_cuda.so", "nvidia/cu13/lib/libcudart.so.13"] {
            let maps = format!(
                "7f0000000000-7f0000001000 r--p 00000000 08:01 42    {}\n7f0000002000-7f0000003000 rw-p 00000000 00:00 0\n",
                at(library)
            );
            assert_eq!(nvrtc_files(&cuda_folders(&maps)), expected, "{library}");
        }
        assert_eq!(cuda_folders("7f00-7f01 r--p 00 08:01 4 /usr/lib/libc.so.6\n"), BTreeSet::new());
        assert!(is_nvrtc("libnvrtc-672ee683.so.12") && !is_nvrtc("libnvrtc-builtins.so.12.4"));
    }

    #[test]
    fn missing_nvrtc_is_named_in_the_error() {
        let error = Nvrtc::open(Path::new("/nowhere/libnvrtc.so.13")).err().unwrap();
        assert!(error.contains("/nowhere/libnvrtc.so.13"), "{error}");
    }
}
