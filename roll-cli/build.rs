//! Arguments of the linker.

/// In a wheel, `roll` lies in `site-packages/roll_cli_cuda/bin` and loads the PyTorch beside it.
/// `--disable-new-dtags` makes the path a DT_RPATH, as in PyTorch's own libraries. It precedes an LD_LIBRARY_PATH with
/// another PyTorch, and a DT_RUNPATH would not. With `--allow-shlib-undefined`, the libraries that PyTorch itself is
/// linked against may be missing on the machine that builds (`scripts/setup-libtorch --headers`).
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is_linux = std::env::var_os("CARGO_CFG_TARGET_OS").is_some_and(|system| system == "linux");
    if is_linux && std::env::var_os("CARGO_FEATURE_LIBTORCH").is_some() {
        let rpath = "--disable-new-dtags,-rpath,$ORIGIN/../../torch/lib";
        println!("cargo::rustc-link-arg-bins=-Wl,{rpath},--allow-shlib-undefined");
    }
}
