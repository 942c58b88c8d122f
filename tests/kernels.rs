//! Compiles the CUDA kernels of the backend `cuda` without a GPU: `kernels/stand_in.c` takes the place of NVIDIA's
//! driver, the real NVRTC compiles, and `ptxas` assembles. Fails if NVRTC or `ptxas` refuses a kernel, if a launch needs
//! more than a block may have, if a kernel of this project spills, or if a compilation takes longer than a minute. The
//! kernels in `roll-backends/src/ops/libtorch/fused` are compiled in the same way.
//!
//! By default, sm_90 compiles tiny networks and a block of A14B, the other architectures a tiny transformer in bf16.
//! `ROLL_KERNELS=all` takes every architecture through all models, and through the tests of operators and parity as far
//! as they are built beside this one. With `ROLL_KERNELS_DIR=DIR`, the results stay in DIR: `DIR/ARCHITECTURE/cache` is a
//! ROLL_CACHE for a machine with such a GPU, if the build has the feature `kernel-cache`.
#![cfg(feature = "cuda")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use std::time::Instant;

/// Architectures of the kernels beside libtorch: T4, A100, RTX 3090, RTX 4090, H100, B200, RTX 5090.
const OF_LIBTORCH: [c_int; 7] = [75, 80, 86, 89, 90, 100, 120];
/// The longest that NVRTC may take for one kernel, in seconds.
const LONGEST: f64 = 60.0;
/// This project's own kernels, by the beginning of their names. The others are CubeCL's, cubek's and Burn's.
const OWN: [&str; 6] = ["backward_", "cotangents_", "exponentials_", "finish_", "forward_", "rotate_pairs_"];
/// In the messages of CubeCL for a kernel that does not compile, or that needs more than the device has.
const FAILURES: [&str; 4] =
    ["error happened during launch", "Too many resources", "[Compilation Error]", "Unable to load the PTX"];

/// Arguments of `roll bench`, for one architecture.
const FEW: [&str; 3] = [
    "--preset tiny --layers 1 --frames 5 --size 32x32 --dtype f32",
    "--preset tiny --layers 1 --frames 5 --size 32x32 --dtype bf16 --vae-dtype bf16",
    "--preset a14b --size 480x480 --layers 1 --without-vae",
];
/// Those of the other architectures: most kernels of a tiny step are the VAE's.
const FEWER: [&str; 1] = ["--preset tiny --layers 1 --frames 5 --size 32x32 --dtype bf16 --without-vae"];
/// Those that `ROLL_KERNELS=all` adds.
const MORE: [&str; 7] = [
    "--preset tiny --layers 1 --weights-dtype int8 --dtype bf16 --without-vae",
    "--preset a14b --size 480x480 --layers 1 --whole-step",
    "--preset a14b --size 480x480 --layers 1 --vae-dtype bf16",
    "--preset a14b --size 480x480 --layers 1 --without-vae --weights-dtype int8",
    "--preset a14b --size 480x832 --layers 1 --without-vae --keep-attention",
    "--preset ti2v-5b --layers 1",
    "--preset 1.3b --layers 1",
];

/// The library and its assembler.
struct Compiler {
    nvrtc: PathBuf,
    ptxas: PathBuf,
}

fn compiler() -> Option<Compiler> {
    let Some(root) = std::env::var_os("CUDA_PATH").map(PathBuf::from) else {
        roll_testing::skip!("CUDA_PATH is not set: eval \"$(scripts/setup-cuda)\"", needs = "nvrtc")
    };
    let first = |names: &[&str]| names.iter().map(|name| root.join(name)).find(|path| path.exists());
    let nvrtc = first(&["lib/libnvrtc.so", "lib/libnvrtc.so.12", "lib64/libnvrtc.so"]);
    let ptxas = first(&["bin/ptxas", "site-packages/nvidia/cuda_nvcc/bin/ptxas"]);
    let (Some(nvrtc), Some(ptxas)) = (nvrtc, ptxas) else {
        roll_testing::skip!(format!("{} has no NVRTC or no ptxas", root.display()), needs = "nvrtc")
    };
    Some(Compiler { nvrtc: std::fs::canonicalize(nvrtc).unwrap(), ptxas })
}

/// One architecture's stand-in, and everything that is compiled with it.
struct StandIn {
    architecture: &'static str,
    /// Holds `driver/libcuda.so.1`, `log`, PTX and `cache`.
    directory: PathBuf,
}

impl StandIn {
    fn new(architecture: &'static str, directory: PathBuf) -> Option<Self> {
        let driver = directory.join("driver");
        std::fs::create_dir_all(&driver).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/kernels/stand_in.c");
        let compiled = Command::new("cc")
            .args(["-std=c11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1", "-o"])
            .args([driver.join("libcuda.so.1"), source])
            .args(["-lpthread", "-ldl"])
            .status();
        if !compiled.is_ok_and(|status| status.success()) {
            roll_testing::skip!("there is no C compiler", needs = "cc");
        }
        for name in ["libcuda.so", "libnvrtc.so"] {
            let link = driver.join(name);
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink("libcuda.so.1", link).unwrap();
        }
        let _ = std::fs::remove_file(directory.join("log"));
        Some(Self { architecture, directory })
    }

    fn command(&self, program: &Path, compiler: &Compiler) -> Command {
        let libraries = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", format!("{}:{libraries}", self.directory.join("driver").display()))
            .env("ROLL_STAND_IN", self.architecture)
            .env("ROLL_STAND_IN_NVRTC", &compiler.nvrtc)
            .env("ROLL_STAND_IN_DIR", &self.directory)
            .env("ROLL_CACHE", self.directory.join("cache"))
            .env("ROLL_CUDA_UNCHECKED", "1")
            .env("ROLL_COMPILE_ONLY", "1")
            .env("ROLL_TEST_BACKENDS", "cuda")
            .env_remove("ROLL_REQUIRE");
        command
    }

    /// Runs a program, and returns its output. Results are zeros, so tests of numbers may fail: kernels may not.
    fn run(&self, command: &mut Command) -> (bool, String) {
        let start = Instant::now();
        let ended = command.output().unwrap();
        let output = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
        eprintln!("{} {}: {:.0} s", self.architecture, arguments.join(" "), start.elapsed().as_secs_f64());
        let failure = FAILURES.iter().find_map(|words| output.find(words));
        let around = |at: usize| output[at..].chars().take(3000).collect::<String>();
        assert!(failure.is_none(), "{arguments:?}: {}", around(failure.unwrap_or(0)));
        (ended.status.success(), output)
    }

    /// Returns the number of kernels that were compiled, and the seconds of the longest.
    fn compilations(&self) -> (usize, f64) {
        let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
        let mut refused = String::new();
        let mut seconds = Vec::new();
        for line in log.lines() {
            match line.split_once(' ').unwrap() {
                ("compiled", taken) => seconds.push(taken.parse::<f64>().unwrap()),
                ("refused", file) => refused += &std::fs::read_to_string(self.directory.join(file)).unwrap(),
                _ => refused += &format!("{line}\n"),
            }
        }
        assert!(refused.is_empty(), "{}: {refused}", self.architecture);
        (seconds.len(), seconds.into_iter().fold(0.0, f64::max))
    }

    /// Assembles every module, and returns the number of kernels and those that spill, with their bytes.
    fn assemble(&self, compiler: &Compiler) -> (usize, BTreeMap<String, u64>) {
        let modules: Vec<PathBuf> = std::fs::read_dir(&self.directory).unwrap().map(|e| e.unwrap().path()).collect();
        let modules = Mutex::new(modules.into_iter().filter(|path| path.extension().is_some_and(|end| end == "ptx")));
        // As CubeCL names it for NVRTC.
        let suffix = if self.architecture == "sm_90" { "a" } else { "" };
        let architecture = format!("-arch={}{suffix}", self.architecture);
        let found = Mutex::new((0, BTreeMap::new()));
        let work = || {
            loop {
                let Some(module) = modules.lock().unwrap().next() else { return };
                let kernels = compiler.assemble(&module, &architecture);
                let mut found = found.lock().unwrap();
                found.0 += kernels.len();
                found.1.extend(kernels.into_iter().filter(|(_, spilled)| *spilled > 0));
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
        found.into_inner().unwrap()
    }
}

impl Compiler {
    /// Assembles a module of PTX, and returns its kernels with the bytes that each spills. `-arch=sm_90` and the like.
    fn assemble(&self, module: &Path, architecture: &str) -> Vec<(String, u64)> {
        let mut command = Command::new(&self.ptxas);
        let ended = command.args(["-v", architecture, "-o", "/dev/null"]).arg(module).output().unwrap();
        let report = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.success(), "ptxas refuses {}: {report}", module.display());
        let kernels = report.split("Compiling entry function '").skip(1);
        let spilled = |kernel| before(kernel, " bytes spill stores") + before(kernel, " bytes spill loads");
        kernels.map(|kernel| (kernel.split('\'').next().unwrap().to_owned(), spilled(kernel))).collect()
    }
}

/// NVRTC, called directly.
struct Nvrtc(libloading::Library);

type Program = *mut c_void;

impl Nvrtc {
    fn open(compiler: &Compiler) -> Self {
        // The library that holds NVRTC's own headers is looked for by name only; here it is loaded already.
        let beside = std::fs::read_dir(compiler.nvrtc.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
        let builtins = beside.filter(|path| path.to_string_lossy().contains("libnvrtc-builtins"));
        // SAFETY: NVIDIA's libraries, whose initialisation has no requirements.
        builtins.for_each(|path| std::mem::forget(unsafe { libloading::Library::new(path) }));
        // SAFETY: as above.
        Self(unsafe { libloading::Library::new(&compiler.nvrtc) }.unwrap())
    }

    /// A function of `nvrtc.h`, whose type the caller must know.
    unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: as the caller promises.
        *unsafe { self.0.get::<F>(name.as_bytes()) }.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// The numbers of the architectures that it compiles for: 90 is sm_90.
    fn architectures(&self) -> Vec<c_int> {
        // SAFETY: the declarations of nvrtc.h; the buffer has the size that the library reports.
        unsafe {
            let count: unsafe extern "C" fn(*mut c_int) -> c_int = self.function("nvrtcGetNumSupportedArchs");
            let list: unsafe extern "C" fn(*mut c_int) -> c_int = self.function("nvrtcGetSupportedArchs");
            let mut number = 0;
            assert_eq!(count(&mut number), 0);
            let mut found = vec![0; number as usize];
            assert_eq!(list(found.as_mut_ptr()), 0);
            found
        }
    }

    /// Compiles `source` to PTX; panics with NVRTC's log if it refuses.
    fn ptx(&self, source: &str, architecture: c_int) -> Vec<u8> {
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Bytes = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        type Strings = *const *const c_char;
        let source = CString::new(source).unwrap();
        let architecture = CString::new(format!("--gpu-architecture=compute_{architecture}")).unwrap();
        // As `roll-backends/src/ops/libtorch/fused/nvrtc.rs` compiles.
        let options = [architecture.as_ptr(), c"--std=c++17".as_ptr()];
        let mut program = null_mut();
        // SAFETY: the declarations of nvrtc.h; strings outlive the calls, buffers have the sizes that it reports.
        unsafe {
            let create: unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                Strings,
                Strings,
            ) -> c_int = self.function("nvrtcCreateProgram");
            let compile: unsafe extern "C" fn(Program, c_int, Strings) -> c_int = self.function("nvrtcCompileProgram");
            let destroy: unsafe extern "C" fn(*mut Program) -> c_int = self.function("nvrtcDestroyProgram");
            let bytes = |size: &str, get: &str, program| {
                let (size, get) = (self.function::<Size>(size), self.function::<Bytes>(get));
                let mut count = 0;
                assert_eq!(size(program, &mut count), 0);
                let mut bytes = vec![0u8; count];
                assert_eq!(get(program, bytes.as_mut_ptr().cast()), 0);
                CStr::from_bytes_until_nul(&bytes).map(|text| text.to_bytes().to_vec()).unwrap_or(bytes)
            };
            assert_eq!(create(&mut program, source.as_ptr(), c"kernels.cu".as_ptr(), 0, null(), null()), 0);
            let code = compile(program, options.len() as c_int, options.as_ptr());
            if code != 0 {
                let log = bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program);
                panic!("NVRTC refuses for {architecture:?} with {code}: {}", String::from_utf8_lossy(&log));
            }
            let ptx = bytes("nvrtcGetPTXSize", "nvrtcGetPTX", program);
            destroy(&mut program);
            ptx
        }
    }
}

/// The number before `words`; 0 without the words.
fn before(text: &str, words: &str) -> u64 {
    let digits = text.find(words).map(|at| text[..at].rsplit(|c: char| !c.is_ascii_digit()).next().unwrap());
    digits.map_or(0, |digits| digits.parse().unwrap())
}

/// The newest test program `deps/STEM-HASH` of this build that has the backend `cuda`.
fn built(stem: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().unwrap();
    let files = std::fs::read_dir(own.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let named = |path: &PathBuf| {
        let hash = path.file_name().unwrap().to_string_lossy().strip_prefix(&format!("{stem}-")).map(str::to_owned);
        hash.is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()))
    };
    let has_cuda = |path: &PathBuf| {
        let wanted = b"cuModuleLoadData";
        std::fs::read(path).unwrap().windows(wanted.len()).any(|window| window == wanted)
    };
    let mut found: Vec<PathBuf> = files.filter(named).filter(has_cuda).collect();
    found.sort_by_key(|path| std::fs::metadata(path).unwrap().modified().unwrap());
    if found.is_empty() {
        roll_testing::skipped(&format!("{stem} is not built with `cuda`: its kernels are not compiled"), None);
    }
    found.pop()
}

/// Compiles the kernels of one architecture: those of `few` runs, or all.
fn check(architecture: &'static str, few: &[&str]) {
    let Some(compiler) = compiler() else { return };
    let compiler = &compiler;
    let all = std::env::var("ROLL_KERNELS").as_deref() == Ok("all");
    let scratch = tempfile::tempdir().unwrap();
    let directory = std::env::var_os("ROLL_KERNELS_DIR").map_or_else(|| scratch.path().to_owned(), PathBuf::from);
    let start = Instant::now();
    let Some(stand_in) = StandIn::new(architecture, directory.join(architecture)) else { return };
    let roll = Path::new(env!("CARGO_BIN_EXE_roll"));
    let runs = if all { [&FEW[..], &MORE[..]].concat() } else { few.to_vec() };
    for arguments in runs {
        let mut command = stand_in.command(roll, compiler);
        command.args(["bench", "--backend", "cuda", "--rounds", "1"]).args(arguments.split(' '));
        let (succeeded, output) = stand_in.run(&mut command);
        assert!(succeeded, "{arguments}: {output}");
    }
    if all {
        for (stem, filter) in [("roll_backends", "ops::"), ("parity", "cuda-")] {
            let Some(program) = built(stem) else { continue };
            // Tests run one after the other: a wrong number ends one, not the program.
            stand_in.run(stand_in.command(&program, compiler).arg(filter));
        }
    }
    let (compiled, longest) = stand_in.compilations();
    let (kernels, spilling) = stand_in.assemble(compiler);
    eprintln!(
        "{architecture}: {compiled} kernels compiled, the longest in {longest:.1} s; {kernels} assembled, none refused, \
         {} spill: {spilling:?}; {:.0} s in all",
        spilling.len(),
        start.elapsed().as_secs_f64()
    );
    assert!(kernels > 20, "{kernels} kernels: the backend was not used");
    assert!(longest < LONGEST, "NVRTC took {longest} s for a kernel");
    let own: Vec<_> = spilling.iter().filter(|(name, _)| OWN.iter().any(|own| name.starts_with(own))).collect();
    assert!(own.is_empty(), "kernels of this project spill: {own:?}");
}

#[test]
fn kernels_of_sm_90_compile_without_a_gpu() {
    check("sm_90", &FEW);
}

#[test]
fn kernels_of_sm_89_compile_without_a_gpu() {
    check("sm_89", &FEWER);
}

#[test]
fn kernels_of_sm_80_compile_without_a_gpu() {
    check("sm_80", &FEWER);
}

#[test]
fn kernels_beside_libtorch_compile_without_spills_for_every_architecture() {
    let Some(compiler) = compiler() else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../roll-backends/src/ops/libtorch/fused");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|end| end == "cu")).collect();
    // `kernels.cu` has what the others use.
    files.sort_by_key(|path| (path.file_name().is_some_and(|name| name != "kernels.cu"), path.clone()));
    let source: String = files.iter().map(|path| std::fs::read_to_string(path).unwrap() + "\n").collect();
    let written = source.lines().filter(|line| line.starts_with("KERNEL(")).count();
    let (nvrtc, scratch) = (Nvrtc::open(&compiler), tempfile::tempdir().unwrap());
    let known = nvrtc.architectures();
    let (compiled, newer): (Vec<_>, Vec<_>) = OF_LIBTORCH.into_iter().partition(|number| known.contains(number));
    for &number in &compiled {
        let start = Instant::now();
        let module = scratch.path().join(format!("{number}.ptx"));
        std::fs::write(&module, nvrtc.ptx(&source, number)).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let kernels = compiler.assemble(&module, &format!("-arch=sm_{number}"));
        eprintln!("sm_{number}: {} kernels beside libtorch compiled in {seconds:.1} s", kernels.len());
        assert_eq!(kernels.len(), written, "sm_{number}: {kernels:?}");
        assert!(kernels.iter().all(|(_, spilled)| *spilled == 0), "sm_{number}: {kernels:?}");
        assert!(seconds < LONGEST, "NVRTC took {seconds} s");
    }
    if !newer.is_empty() {
        roll_testing::skipped(&format!("this NVRTC does not know sm_{newer:?}"), None);
    }
    assert!(written > 8 && compiled.len() > 4, "{written} kernels, compiled for {compiled:?}");
}
