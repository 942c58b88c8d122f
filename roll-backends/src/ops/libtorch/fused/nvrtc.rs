//! CUDA's run-time compiler: finding it, and machine code of `kernels.cu` for one kind of GPU.
//!
//! Declared from `nvrtc.h`, whose functions are the same in CUDA 11.2 to 13. The crate `cudarc` declares them too, but
//! looks for the library by name alone, and panics without it. Torch's wheels keep it in a folder that no loader searches.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use libloading::Library;

/// The kernels.
pub(super) const SOURCE: &str =
    concat!(include_str!("kernels.cu"), "\n", include_str!("channel_norm.cu"), "\n", include_str!("adam.cu"));

/// For the loader, where torch's own folders have none. Newest first: an old one does not know new GPUs.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// Libraries that stand in the folder of the compiler, or in one beside it.
const NEIGHBOURS: [&str; 5] = ["libnvrtc.", "libcudart", "libtorch_cuda", "libc10_cuda", "libcublas"];

type Program = *mut c_void;
type Strings = *const *const c_char;

/// The functions of the compiler that are used here.
pub(super) struct Nvrtc {
    create: unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, Strings) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    code_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    code: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    file: String,
}

/// The form that [`Nvrtc::compile`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// Machine code of one architecture, which loads in milliseconds and asks nothing of the driver.
    Code,
    /// What `ptxas` and other tools read.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests count registers with it"))]
    Ptx,
}

impl Nvrtc {
    /// The compiler that stands beside torch's libraries, else the one that the system's loader finds. Fails with the
    /// missing part.
    pub(super) fn load() -> Result<Self, String> {
        let beside = beside_loaded();
        let mut reasons = Vec::new();
        for path in beside.iter().map(PathBuf::as_path).chain(NAMES.map(Path::new)) {
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

    /// Loads the compiler at a path or of a name.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        open_builtins(path);
        let library = open(path)?;
        // SAFETY: the signatures are those of `nvrtc.h`.
        let found = unsafe {
            Self {
                create: symbol(&library, "nvrtcCreateProgram")?,
                compile: symbol(&library, "nvrtcCompileProgram")?,
                destroy: symbol(&library, "nvrtcDestroyProgram")?,
                code_size: symbol(&library, "nvrtcGetCUBINSize")?,
                code: symbol(&library, "nvrtcGetCUBIN")?,
                ptx_size: symbol(&library, "nvrtcGetPTXSize")?,
                ptx: symbol(&library, "nvrtcGetPTX")?,
                log_size: symbol(&library, "nvrtcGetProgramLogSize")?,
                log: symbol(&library, "nvrtcGetProgramLog")?,
                error: symbol(&library, "nvrtcGetErrorString")?,
                file: path.display().to_string(),
            }
        };
        // Never unloaded: the functions are kept, and threads of its own may run in it.
        std::mem::forget(library);
        Ok(found)
    }

    /// The name or path that it was loaded by.
    #[cfg(test)]
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// `source` for an architecture such as `sm_90`. Fails with the compiler's own words.
    pub(super) fn compile(&self, source: &str, architecture: &str, output: Output) -> Result<Vec<u8>, String> {
        let source = CString::new(source).map_err(|_| "the source of the kernels has a zero byte".to_string())?;
        let architecture = match output {
            Output::Code => architecture.to_owned(),
            Output::Ptx => architecture.replace("sm_", "compute_"),
        };
        let option = CString::new(format!("--gpu-architecture={architecture}")).map_err(|e| e.to_string())?;
        let options = [option.as_ptr(), c"--std=c++17".as_ptr()];
        let mut program = null_mut();
        // SAFETY: strings end with a zero byte and outlive the call; no headers are given.
        let code = unsafe { (self.create)(&mut program, source.as_ptr(), c"kernels.cu".as_ptr(), 0, null(), null()) };
        self.check("nvrtcCreateProgram", code)?;
        // SAFETY: as above, for as many options as are said.
        let compiled = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        let result = match self.check("nvrtcCompileProgram", compiled) {
            Ok(()) => match output {
                Output::Code => self.bytes(program, self.code_size, self.code),
                Output::Ptx => self.bytes(program, self.ptx_size, self.ptx),
            },
            Err(error) => {
                let log = self.bytes(program, self.log_size, self.log).unwrap_or_default();
                let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
                Err(format!("{error} for {architecture}: {log}"))
            }
        };
        // SAFETY: made above, and not used hereafter.
        unsafe { (self.destroy)(&mut program) };
        result
    }

    /// The bytes that `get` writes, as many as `size` says.
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
        // SAFETY: there is room for as many bytes as the library has said.
        self.check("nvrtcGet...", unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: gives a constant string for every code.
        let text = unsafe { text((self.error)(code)) };
        Err(format!("{call} of {} failed with {code} ({text})", self.file))
    }
}

/// A library, with the reason as a sentence if it cannot be loaded.
pub(super) fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: libraries of NVIDIA, whose initialisers do nothing that this process must know of.
    unsafe { Library::new(path) }.map_err(|e| {
        // The loader's own words are the error's source.
        let reason = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
        format!("{} cannot be loaded: {reason}", path.display())
    })
}

/// A function of a library that stays loaded.
///
/// # Safety
/// `F` is the type of the function of that name.
pub(super) unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: as the caller promises.
    unsafe { library.get::<F>(name) }.map(|found| *found).map_err(|e| format!("{name} is missing: {e}"))
}

/// # Safety
/// A C string that lives long enough to be copied, or null.
pub(super) unsafe fn text(at: *const c_char) -> String {
    // SAFETY: as the caller promises.
    if at.is_null() { String::new() } else { unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned() }
}

/// The compiler opens a second library by its bare name, which the loader finds in no folder of torch's: but it takes one
/// that is loaded already.
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

/// Compilers in the folders of the CUDA libraries that this process has loaded, and in folders beside those.
fn beside_loaded() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    compilers(&loaded(&maps))
}

/// The folders of CUDA's and torch's libraries in the memory map of a process.
fn loaded(maps: &str) -> BTreeSet<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let cuda = paths.filter(|path| NEIGHBOURS.iter().any(|name| name_of(path).starts_with(name)));
    cuda.filter_map(|path| path.parent().map(Path::to_path_buf)).collect()
}

/// In `folders` themselves; then in those of NVIDIA's packages: `torch/lib` has `nvidia/*/lib` two folders up, and
/// `nvidia/cuda_runtime/lib` its like.
fn compilers(folders: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = folders.iter().cloned().collect();
    for folder in folders {
        for up in ["../../nvidia", "../.."] {
            let Ok(packages) = folder.join(up).canonicalize() else { continue };
            if packages.ends_with("nvidia") {
                let mut beside: Vec<_> = files(&packages).into_iter().map(|package| package.join("lib")).collect();
                beside.sort();
                all.extend(beside);
            }
        }
    }
    let mut found = Vec::new();
    for folder in all {
        let mut here: Vec<_> = files(&folder).into_iter().filter(|path| is_compiler(&name_of(path))).collect();
        here.sort();
        for path in here {
            if !found.contains(&path) {
                found.push(path);
            }
        }
    }
    found
}

/// `libnvrtc.so.13`, or `libnvrtc-672ee683.so.12` in the archives of libtorch; but not its second library, nor the
/// variant for old processors.
fn is_compiler(name: &str) -> bool {
    name.starts_with("libnvrtc") && name.contains(".so") && !name.contains("builtins") && !name.contains(".alt.")
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn fused_kernels_find_the_compiler_that_torch_brings_along() {
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
            assert_eq!(compilers(&loaded(&maps)), expected, "{library}");
        }
        assert_eq!(loaded("7f00-7f01 r--p 00 08:01 4 /usr/lib/libc.so.6\n"), BTreeSet::new());
        assert!(is_compiler("libnvrtc-672ee683.so.12") && !is_compiler("libnvrtc-builtins.so.12.4"));
    }

    #[test]
    fn fused_kernels_without_a_compiler_say_what_is_missing() {
        let error = Nvrtc::open(Path::new("/nowhere/libnvrtc.so.13")).err().unwrap();
        assert!(error.contains("/nowhere/libnvrtc.so.13"), "{error}");
    }
}
