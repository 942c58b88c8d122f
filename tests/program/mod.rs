//! The program under test.

use std::process::Command;

/// `roll` without settings of the user who runs the test, but the backend: `ROLL_BACKEND=libtorch cargo test ...` tests
/// a user's work on another one.
pub fn roll() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_roll"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ROLL_") && name != "ROLL_BACKEND") {
        command.env_remove(name);
    }
    // No test writes to the home of who runs it.
    command.env("ROLL_CACHE", "none");
    command
}
