//! Skips of tests that are visible in the output, and the variable `ROLL_REQUIRE`, which turns a skip into a failure.

use std::io::Write;

/// Capabilities that not every machine has: the name that `ROLL_REQUIRE` and [`skip!`](crate::skip) use, and a
/// description.
pub const CAPABILITIES: [(&str, &str); 14] = [
    ("cc", "a C compiler, `cc`"),
    ("chromium", "Chromium or Chrome, with H.264"),
    ("clip", "CLIP directories of `roll-rewards/scorers/tests/data/make_clip.py`, in `$ROLL_TEST_CLIP`"),
    ("diffusers", "a Python (`$PYTHON`) with diffusers and PEFT"),
    ("ffmpeg", "`ffmpeg` and `ffprobe`, with the usual codecs"),
    ("gguf", "SmolLM2-135M-Instruct.Q4_1.gguf, named by `$ROLL_TEST_GGUF`"),
    ("gpu", "an NVIDIA GPU with its driver; for NCCL its library as well"),
    ("media", "face networks and media under `$ROLL_TEST_DATA`, by default `../shared` beside the repository"),
    ("nvrtc", "CUDA's run-time compiler, headers and `ptxas` under `$CUDA_PATH`; `scripts/setup-cuda` fetches them"),
    ("onnxruntime", "ONNX Runtime's library"),
    ("openai", "a `python3` with the package `openai`"),
    ("python", "`python3`"),
    ("torch", "a Python (`$PYTHON`, or `python3`) with PyTorch and NumPy"),
    ("vulkan", "a device of `wgpu`; Mesa's driver makes one of the CPU"),
];

/// Returns from a test that this machine cannot run, after one line on standard error that bypasses the test runner's
/// capture: a skipped test must not look like a passed one.
///
/// `needs` names a [capability](CAPABILITIES). If the variable `ROLL_REQUIRE` lists it (comma-separated, or `all`), the
/// test panics instead. A skip without a capability never fails.
///
/// The function returns its `Default`: `()` from a test, `None` from a helper that looks for the missing part.
///
/// ```
/// fn compiler() -> Option<std::path::PathBuf> {
///     let path = std::path::PathBuf::from("/usr/bin/cc");
///     if !path.exists() {
///         roll_testing::skip!("there is no C compiler", needs = "cc");
///     }
///     Some(path)
/// }
/// ```
#[macro_export]
macro_rules! skip {
    ($why:expr $(,)?) => {{
        $crate::skipped(&$why, ::core::option::Option::None);
        return ::core::default::Default::default();
    }};
    ($why:expr, needs = $capability:literal $(,)?) => {{
        const { assert!($crate::is_capability($capability), "no capability of roll_testing::CAPABILITIES") };
        $crate::skipped(&$why, ::core::option::Option::Some($capability));
        return ::core::default::Default::default();
    }};
}

/// Reports a skipped case like [`skip!`](crate::skip), for a test that then continues with its other cases.
///
/// # Panics
/// If `ROLL_REQUIRE` lists `needs`.
pub fn skipped(why: &dyn std::fmt::Display, needs: Option<&str>) {
    let test = std::thread::current().name().map(str::to_owned).unwrap_or_default();
    let label = needs.map(|name| format!(" [{name}]")).unwrap_or_default();
    if let Some(name) = needs
        && is_required(name)
    {
        panic!("{why}, and ROLL_REQUIRE says that this machine has what tests of `{name}` need");
    }
    // A single write, so that lines of several threads are not interleaved.
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}{label}: {why}\n").as_bytes());
}

/// Whether `ROLL_REQUIRE` lists `capability`: tests that need it must then not be skipped.
///
/// # Panics
/// If `ROLL_REQUIRE` lists a word that is not a [capability](CAPABILITIES), which would require nothing.
pub fn is_required(capability: &str) -> bool {
    let list = std::env::var("ROLL_REQUIRE").unwrap_or_default();
    listed(&list, capability).unwrap_or_else(|unknown| {
        let known = CAPABILITIES.map(|(name, _)| name).join(", ");
        panic!("ROLL_REQUIRE lists `{unknown}`; expected `all` or some of {known}")
    })
}

/// Whether `list` contains `capability`; `Err` is an unknown word of the list.
fn listed<'a>(list: &'a str, capability: &str) -> Result<bool, &'a str> {
    let words = || list.split(',').map(str::trim).filter(|word| !word.is_empty());
    match words().find(|word| *word != "all" && !is_capability(word)) {
        Some(unknown) => Err(unknown),
        None => Ok(words().any(|word| word == "all" || word == capability)),
    }
}

/// Whether `name` is in [`CAPABILITIES`].
pub const fn is_capability(name: &str) -> bool {
    let mut i = 0;
    while i < CAPABILITIES.len() {
        if same(CAPABILITIES[i].0.as_bytes(), name.as_bytes()) {
            return true;
        }
        i += 1;
    }
    false
}

/// Compares slices; `==` is not `const`.
const fn same(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    a.len() == b.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roll_require_lists_capabilities_or_all() {
        assert_eq!(listed("", "cc"), Ok(false));
        assert_eq!(listed("python, cc,", "cc"), Ok(true));
        assert_eq!(listed("python,vulkan", "cc"), Ok(false));
        for (name, _) in CAPABILITIES {
            assert_eq!(listed("all", name), Ok(true));
        }
    }

    #[test]
    fn rejects_unknown_capabilities() {
        assert_eq!(listed("cc,vulcan", "cc"), Err("vulcan"));
        assert!(!is_capability("c") && !is_capability("ccc") && !is_capability(""));
    }
}
