//! Settings in which this project differs from CubeCL's defaults.

#[cfg(feature = "kernel-cache")]
use std::path::PathBuf;

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

/// Keeps compiled kernels where it is not `0`.
#[cfg(feature = "kernel-cache")]
const SWITCH: &str = "ROLL_KERNEL_CACHE";

/// Sets CubeCL up, unless a `cubecl.toml` or `burn.toml` in the working directory or above says otherwise, or it is set
/// up already. Before the first device: later it has no effect.
pub fn set_up(own: impl FnOnce(&mut CubeClRuntimeConfig)) {
    if has_own_settings() {
        return;
    }
    let mut config = CubeClRuntimeConfig::default().override_from_env();
    own(&mut config);
    keep_kernels(&mut config);
    CubeClRuntimeConfig::try_set(config);
}

/// Kernels are compiled once for a GPU, a driver and a build of this program, and kept for later runs; several processes
/// may share the directory. A directory that cannot be written costs the time of compiling.
#[cfg(feature = "kernel-cache")]
fn keep_kernels(config: &mut CubeClRuntimeConfig) {
    let Some(directory) = kernel_directory(|name| std::env::var_os(name)) else { return };
    tracing::debug!("compiled kernels are kept in {}", directory.display());
    config.compilation.cache = true;
    config.environment.path = cubecl::config::cache::CacheConfig::Directory(directory);
}

#[cfg(not(feature = "kernel-cache"))]
fn keep_kernels(_: &mut CubeClRuntimeConfig) {}

/// `kernels` in the directory of files that are kept between runs.
#[cfg(feature = "kernel-cache")]
fn kernel_directory(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    match variable(SWITCH) {
        Some(off) if off == "0" => None,
        _ => crate::cache_directory::of(variable).map(|directory| directory.join("kernels")),
    }
}

fn has_own_settings() -> bool {
    const FILES: [&str; 4] = ["cubecl.toml", "CubeCL.toml", "burn.toml", "Burn.toml"];
    std::env::current_dir()
        .is_ok_and(|here| here.ancestors().any(|dir| FILES.iter().any(|file| dir.join(file).exists())))
}

#[cfg(all(test, feature = "kernel-cache"))]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_kept_beside_what_else_is_kept_unless_switched_off() {
        let at = |variables: &[(&str, &str)]| {
            kernel_directory(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
        };
        assert_eq!(at(&[("HOME", "/home/a")]), Some("/home/a/.cache/roll/kernels".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (SWITCH, "1")]), Some("/home/a/.cache/roll/kernels".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (SWITCH, "0")]), None);
        assert_eq!(at(&[("HOME", "/home/a"), ("ROLL_CACHE", "none")]), None);
    }
}
