//! Compiles the CUDA kernels of the backend `cuda` without a GPU: `kernels/stand_in.c` takes the place of NVIDIA's
//! driver, the real NVRTC compiles, and `ptxas` assembles. Fails if NVRTC or `ptxas` refuses a kernel, if a launch needs
//! more than a block may have, if a kernel of this project spills, or if a compilation takes longer than a minute.
//!
//! By default for one architecture, tiny networks and a block of A14B. `ROLL_KERNELS=all` adds the other architectures,
//! the other models, and the tests of operators and parity as far as they are built beside this one. With
//! `ROLL_KERNELS_DIR=DIR`, the results stay in DIR: `DIR/ARCHITECTURE/cache` is a ROLL_CACHE for a machine with such a
//! GPU, if the build has the feature `kernel-cache`.
#![cfg(feature = "cuda")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

/// Compute capabilities: A100, RTX 4090, H100.
const ARCHITECTURES: [&str; 3] = ["sm_90", "sm_89", "sm_80"];
/// The longest that NVRTC may take for one kernel, in seconds.
const LONGEST: f64 = 60.0;
/// This project's own kernels, by the beginning of their names. The others are CubeCL's, cubek's and Burn's.
const OWN: [&str; 6] = ["backward_", "cotangents_", "exponentials_", "finish_", "forward_", "rotate_pairs_"];
/// In the messages of CubeCL for a kernel that does not compile, or that needs more than the device has.
const FAILURES: [&str; 4] =
    ["error happened during launch", "Too many resources", "[Compilation Error]", "Unable to load the PTX"];

/// Arguments of `roll bench`, for each default run.
const FEW: [&str; 3] = [
    "--preset tiny --layers 1 --frames 5 --size 32x32 --dtype f32",
    "--preset tiny --layers 1 --frames 5 --size 32x32 --dtype bf16 --vae-dtype bf16",
    "--preset a14b --size 480x480 --layers 1 --without-vae",
];
/// Those of `ROLL_KERNELS=all`.
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
                let ended = Command::new(&compiler.ptxas)
                    .args(["-v", &architecture, "-o", "/dev/null"])
                    .arg(&module)
                    .output()
                    .unwrap();
                let report = String::from_utf8_lossy(&ended.stderr).into_owned();
                assert!(ended.status.success(), "ptxas refuses {}: {report}", module.display());
                let mut found = found.lock().unwrap();
                for kernel in report.split("Compiling entry function '").skip(1) {
                    let name = kernel.split('\'').next().unwrap();
                    found.0 += 1;
                    let spilled = before(kernel, " bytes spill stores") + before(kernel, " bytes spill loads");
                    if spilled > 0 {
                        found.1.insert(name.to_owned(), spilled);
                    }
                }
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
        found.into_inner().unwrap()
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

fn check(architecture: &'static str, directory: PathBuf, compiler: &Compiler, all: bool) -> Option<()> {
    let start = Instant::now();
    let stand_in = StandIn::new(architecture, directory)?;
    let roll = Path::new(env!("CARGO_BIN_EXE_roll"));
    let more = if all { &MORE[..] } else { &[] };
    for arguments in FEW.iter().chain(more) {
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
    Some(())
}

#[test]
fn kernels_compile_without_a_gpu() {
    let Some(compiler) = compiler() else { return };
    let all = std::env::var("ROLL_KERNELS").as_deref() == Ok("all");
    let scratch = tempfile::tempdir().unwrap();
    let directory = std::env::var_os("ROLL_KERNELS_DIR").map_or_else(|| scratch.path().to_owned(), PathBuf::from);
    let architectures = if all { &ARCHITECTURES[..] } else { &ARCHITECTURES[..1] };
    for &architecture in architectures {
        if check(architecture, directory.join(architecture), &compiler, all).is_none() {
            return;
        }
    }
}
