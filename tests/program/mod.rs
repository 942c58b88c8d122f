//! The program under test.

use std::path::Path;
use std::process::{Command, Output};

/// The path of `roll`.
pub const PATH: &str = env!("CARGO_BIN_EXE_roll");

/// `roll` in `directory`, without settings of the user who runs the test, but the backend: `ROLL_BACKEND=libtorch cargo
/// test ...` tests a user's work on another one. No test writes to the user's home.
pub fn command(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(PATH);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ROLL_") && name != "ROLL_BACKEND") {
        command.env_remove(name);
    }
    command.env("ROLL_CACHE", "none").args(arguments).current_dir(directory);
    command
}

/// Runs `roll` in `directory` to its end.
pub fn roll(directory: &Path, arguments: &[&str]) -> Output {
    command(directory, arguments).output().unwrap()
}

/// Standard output of a command that must succeed.
pub fn done(directory: &Path, arguments: &[&str]) -> String {
    let output = roll(directory, arguments);
    assert!(output.status.success(), "roll {arguments:?}: {}", said(&output));
    printed(&output)
}

/// Standard output.
pub fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error.
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts an exit code, and that standard error contains all of `parts`.
pub fn fails(output: &Output, code: i32, parts: &[&str]) {
    let said = said(output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    parts.iter().for_each(|part| assert!(said.contains(part), "no {part} in: {said}"));
}
