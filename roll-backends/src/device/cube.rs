//! CubeCL settings of this project that differ from the defaults.

#[cfg(feature = "kernel-cache")]
use std::path::PathBuf;

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

/// Environment variable that disables the kernel cache if it is `0`.
#[cfg(feature = "kernel-cache")]
const SWITCH: &str = "ROLL_KERNEL_CACHE";

/// Configures CubeCL; `change` makes the changes for one kind of device. Must be called before the first device is
/// opened; later calls have no effect. A `cubecl.toml` or `burn.toml` in the working directory or one of its parents
/// takes precedence.
pub fn set_up(change: impl FnOnce(&mut CubeClRuntimeConfig)) {
    if has_user_settings() {
        return;
    }
    let mut config = CubeClRuntimeConfig::default().override_from_env();
    change(&mut config);
    enable_kernel_cache(&mut config);
    CubeClRuntimeConfig::try_set(config);
}

/// Enables CubeCL's cache of compiled kernels, which is keyed by GPU, driver and build of this program. Several
/// processes may share the directory. If the directory is not writable, kernels are compiled anew.
#[cfg(feature = "kernel-cache")]
fn enable_kernel_cache(config: &mut CubeClRuntimeConfig) {
    let Some(directory) = kernel_directory(|name| std::env::var_os(name)) else { return };
    tracing::debug!("compiled kernels are kept in {}", directory.display());
    config.compilation.cache = true;
    config.environment.path = cubecl::config::cache::CacheConfig::Directory(directory);
}

#[cfg(not(feature = "kernel-cache"))]
fn enable_kernel_cache(_: &mut CubeClRuntimeConfig) {}

/// The folder `kernels` of the cache directory; `None` if the cache is disabled.
#[cfg(feature = "kernel-cache")]
fn kernel_directory(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    match variable(SWITCH) {
        Some(off) if off == "0" => None,
        _ => crate::cache_directory::of(variable).map(|directory| directory.join("kernels")),
    }
}

/// Whether the user configures CubeCL by a file.
fn has_user_settings() -> bool {
    const FILES: [&str; 4] = ["cubecl.toml", "CubeCL.toml", "burn.toml", "Burn.toml"];
    std::env::current_dir()
        .is_ok_and(|here| here.ancestors().any(|dir| FILES.iter().any(|file| dir.join(file).exists())))
}

#[cfg(feature = "kernel-cache")]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_cached_unless_switched_off() {
        let at = |variables: &[(&str, &str)]| {
            kernel_directory(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
        };
        assert_eq!(at(&[("HOME", "/home/a")]), Some("/home/a/.cache/roll/kernels".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (SWITCH, "1")]), Some("/home/a/.cache/roll/kernels".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (SWITCH, "0")]), None);
        assert_eq!(at(&[("HOME", "/home/a"), ("ROLL_CACHE", "none")]), None);
    }
}
