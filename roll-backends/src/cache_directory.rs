//! The directory of files that are kept between runs and recomputed if they are missing.

use std::ffi::OsString;
use std::path::PathBuf;

/// The environment variable that names the directory.
pub const VARIABLE: &str = "ROLL_CACHE";

roll_core::inventory::submit! { roll_core::Variable(VARIABLE) }

/// The directory that [`VARIABLE`] names, or else the directory `roll` in `XDG_CACHE_HOME` or `~/.cache`. `None` if
/// [`VARIABLE`] is `none`, or if there is no home directory. `variable` returns the value of an environment variable.
pub fn of(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path_in = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    match path_in(VARIABLE) {
        Some(path) if path.as_os_str() == "none" => None,
        Some(path) => Some(path),
        None => {
            // The XDG specification ignores relative paths.
            let xdg = path_in("XDG_CACHE_HOME").filter(|path| path.is_absolute());
            let caches = xdg.or_else(|| Some(path_in("HOME")?.join(".cache")))?;
            Some(caches.join("roll"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_selects_the_directory() {
        let at = |variables: &[(&str, &str)]| {
            of(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
        };
        assert_eq!(at(&[("HOME", "/home/a")]), Some("/home/a/.cache/roll".into()));
        assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "/c")]), Some("/c/roll".into()));
        assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "c")]), Some("/home/a/.cache/roll".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (VARIABLE, "/mine")]), Some("/mine".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (VARIABLE, "none")]), None);
        assert_eq!(at(&[]), None);
    }
}
