//! Plugins: the contract of the boundary, plugins that break it, and files that are not plugins.

#![allow(clippy::unwrap_used)]

mod contract;
mod files;
mod overhead;
mod rules;

use std::path::{Path, PathBuf};
use std::process::Command;

use roll_core::{BuildContext, Options, Registry, Replaces, RewardScorer, Tensor, Video, one_line};
use roll_plugin::Plugin;
use tempfile::TempDir;

/// The library of a crate that these tests depend on: cargo puts it beside the test itself.
fn library(name: &str) -> PathBuf {
    let directory = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    directory.join(format!("{prefix}{name}{suffix}"))
}

fn plugin(name: &str) -> Plugin {
    roll_plugin::load(library(name)).unwrap()
}

/// The components of the plugin; this program has no built-in ones.
fn registry(plugin: &Plugin) -> Registry {
    Registry::linked().unwrap().with_components(&plugin.registrations(), Replaces::Nothing).unwrap()
}

fn context() -> BuildContext {
    BuildContext { seed: 1, ..BuildContext::new("flex") }
}

/// Options with string values.
fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().map(|(key, value)| (key.to_string(), (*value).into())).collect()
}

/// Makes the reward of the library with this fault.
fn hostile(at: &str, how: &str) -> roll_core::Result<Box<dyn RewardScorer>> {
    registry(&plugin("hostile_plugin")).reward("hostile", &options(&[("at", at), ("how", how)]), &context())
}

fn video() -> Video {
    let values = (0..2 * 3 * 8 * 8).map(|i| ((i * 37 % 101) as f32) / 101.0 - 0.5).collect();
    Video::new(Tensor::new(values, [2, 3, 8, 8]).unwrap(), 8.0).unwrap()
}

/// Fails unless the error names each of `parts`; `case` says which one it was.
fn names(case: &str, error: &roll_core::Error, parts: &[&str]) {
    let message = one_line(error);
    for part in parts {
        assert!(message.contains(part), "{case}: no {part} in: {message}");
    }
}

/// The library that `cc` makes of `source`. Without `cc` the test is skipped aloud, and the result is `None`.
fn compile(dir: &TempDir, name: &str, source: &str, arguments: &[String]) -> Option<PathBuf> {
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
