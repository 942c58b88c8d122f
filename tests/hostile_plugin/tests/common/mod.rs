//! Libraries for the tests: those of crates that they depend on, and those that a C compiler makes.

#![allow(dead_code)] // each test file uses some

use std::path::{Path, PathBuf};
use std::process::Command;

/// The library of a crate that these tests depend on: cargo puts it beside the test itself.
pub fn library(name: &str) -> PathBuf {
    let directory = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    directory.join(format!("{prefix}{name}{suffix}"))
}

/// The library that `cc` makes of `source`; `None`, said aloud, where there is no `cc`.
pub fn compile(dir: &tempfile::TempDir, name: &str, source: &str, arguments: &[&str]) -> Option<PathBuf> {
    let (code, library) = (dir.path().join(format!("{name}.c")), dir.path().join(format!("lib{name}.so")));
    std::fs::write(&code, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../roll-plugin/include");
    let built = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-I"])
        .arg(include)
        .args(arguments)
        .arg(&code)
        .arg("-o")
        .arg(&library)
        .output();
    match built {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(library)
        }
        Err(error) => {
            roll_testing::skip!(format!("plugins in C are not tested without a C compiler (cc: {error})"), needs = "cc")
        }
    }
}
