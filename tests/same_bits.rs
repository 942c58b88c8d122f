//! The script that compares two builds bit for bit finds a difference where there is one, and none elsewhere.

use std::process::Command;

use crate::program::{self, printed, root, stderr_text};

#[test]
fn the_comparison_of_builds_tells_equal_runs_from_different_ones() {
    if Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skip!("there is no Python", needs = "python");
    }
    let script = root().join("bench/same_bits.py");
    let output = Command::new("python3").arg(script).args(["--self-test", program::PATH]).output().unwrap();
    let said = printed(&output);
    assert!(output.status.success(), "{said}{}", stderr_text(&output));
    assert_eq!(said.lines().last(), Some("0 wrong verdicts"), "{said}");
    let verdicts = |verdict: &str| said.lines().filter(|line| line.contains(&format!(" {verdict} "))).count();
    assert!(verdicts("same") >= 4 && verdicts("DIFFERS") == 2 * verdicts("same"), "{said}");
}
