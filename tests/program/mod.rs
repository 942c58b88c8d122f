//! The program under test.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The path of `roll`.
pub const PATH: &str = env!("CARGO_BIN_EXE_roll");

/// The checkout.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// The directory of the key that signs the runs of tests.
pub const STATE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/state");

/// `roll` in `directory`, without settings of the user who runs the test, but the backend: `ROLL_BACKEND=libtorch cargo
/// test ...` tests a user's work on another one. No test writes to the user's home.
pub fn command(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(PATH);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ROLL_") && name != "ROLL_BACKEND") {
        command.env_remove(name);
    }
    // Variables that choose what is logged and in which colours.
    for name in ["RUST_LOG", "NO_COLOR"] {
        command.env_remove(name);
    }
    command.env("ROLL_CACHE", "none").env("ROLL_STATE", STATE).args(arguments).current_dir(directory);
    command
}

/// Restores the default reaction to the signals that end a run: a runner may ignore some of them, as `nohup` and many
/// CI systems do, and children inherit that.
#[cfg(unix)]
pub fn with_default_signals(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt;
    let restore = || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGUSR1] {
            // SAFETY: `signal` is async-signal-safe, and no handler of the child is replaced.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure calls `signal` alone, which is async-signal-safe.
    unsafe { command.pre_exec(restore) }
}

/// Runs `roll` in `directory` to its end.
pub fn roll(directory: &Path, arguments: &[&str]) -> Output {
    command(directory, arguments).output().unwrap()
}

/// Standard output of a command that must succeed.
pub fn done(directory: &Path, arguments: &[&str]) -> String {
    let output = roll(directory, arguments);
    assert!(output.status.success(), "roll {arguments:?}: {}", stderr_text(&output));
    printed(&output)
}

/// Standard output.
pub fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error.
pub fn stderr_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts an exit code, and that standard error contains all of `parts`.
pub fn fails(output: &Output, code: i32, parts: &[&str]) {
    let messages = stderr_text(output);
    assert_eq!(output.status.code(), Some(code), "{messages}");
    parts.iter().for_each(|part| assert!(messages.contains(part), "no {part} in: {messages}"));
}
