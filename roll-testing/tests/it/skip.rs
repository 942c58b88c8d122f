//! Output and exit code of skipped tests; the test program runs itself.

use std::process::{Command, Output};

/// Runs `name`, one of the ignored tests below, with the given `ROLL_REQUIRE`.
fn ran(name: &str, required: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    Command::new(program)
        .args(["--exact", &format!("skip::{name}"), "--ignored"])
        .env("ROLL_REQUIRE", required)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    out + &error
}

#[test]
#[ignore = "run by the tests below"]
fn for_want_of_a_compiler() {
    roll_testing::skip!(format!("no {}", "compiler"), needs = "cc");
}

#[test]
#[ignore = "run by the tests below"]
fn for_no_want() {
    roll_testing::skip!("a machine that has everything");
}

#[test]
fn a_skip_prints_one_line_and_the_test_passes() {
    for required in ["", "vulkan,python"] {
        let output = ran("for_want_of_a_compiler", required);
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "SKIPPED skip::for_want_of_a_compiler [cc]: no compiler\n");
    }
}

#[test]
fn a_required_capability_fails_the_test() {
    for required in ["all", "python,cc"] {
        let output = ran("for_want_of_a_compiler", required);
        assert!(!output.status.success() && said(&output).contains("no compiler"), "{}", said(&output));
    }
}

#[test]
fn a_skip_without_capability_never_fails() {
    let output = ran("for_no_want", "all");
    assert!(output.status.success() && said(&output).contains("has everything"), "{}", said(&output));
}

#[test]
fn a_misspelt_requirement_fails_skipped_tests() {
    let output = ran("for_want_of_a_compiler", "cc,vulcan");
    assert!(!output.status.success() && said(&output).contains("`vulcan`"), "{}", said(&output));
}

#[test]
fn a_helper_that_skips_returns_none() {
    fn found(there: bool) -> Option<u8> {
        if !there {
            roll_testing::skip!("shown here: a helper's skip");
        }
        Some(1)
    }
    assert_eq!(found(true), Some(1));
}
