//! Arguments of the linker.

/// In a wheel, `roll` lies in `site-packages/roll_cli_cuda/bin` and loads the PyTorch beside it. DT_RPATH, as PyTorch's
/// own libraries have, precedes the LD_LIBRARY_PATH of another PyTorch; DT_RUNPATH would not. The libraries that
/// PyTorch itself is linked against may be missing on the machine that builds (`scripts/setup-libtorch --headers`).
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let linux = std::env::var_os("CARGO_CFG_TARGET_OS").is_some_and(|system| system == "linux");
    if linux && std::env::var_os("CARGO_FEATURE_LIBTORCH").is_some() {
        let rpath = "--disable-new-dtags,-rpath,$ORIGIN/../../torch/lib";
        println!("cargo::rustc-link-arg-bins=-Wl,{rpath},--allow-shlib-undefined");
    }
}
