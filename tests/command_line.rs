//! The command line describes itself.

#![allow(clippy::unwrap_used)]

mod world;

use std::process::Stdio;

use world::{World, fails, said};

#[test]
fn every_command_has_help_with_an_example_a_manual_page_and_completions() {
    let world = World::new(0);
    let help = world.done(&["--help"]);
    assert!(help.contains("Exit codes") && help.contains("roll run --resume"), "{help}");
    let commands = help.split("Commands:").nth(1).unwrap().split("Options:").next().unwrap();
    let commands: Vec<&str> = commands.lines().filter_map(|l| l.strip_prefix("  ")?.split(' ').next()).collect();
    let commands: Vec<&str> = commands.into_iter().filter(|c| !c.is_empty() && *c != "help").collect();
    assert!(commands.contains(&"run") && commands.contains(&"report"), "{commands:?}");
    world.done(&["man", "--out", "man"]);
    let bash = world.done(&["completions", "bash"]);
    for command in commands {
        let help = world.done(&[command, "--help"]);
        assert!(
            help.contains("Example") && help.contains(&format!("roll {command}")) || command == "plugins",
            "{help}"
        );
        let page = std::fs::read_to_string(world.path(&format!("man/roll-{command}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains("Example"), "{command}");
        assert!(bash.contains(command), "{command}");
    }
    assert!(world.done(&["man"]).contains("SUBCOMMANDS"));
    for shell in ["zsh", "fish", "powershell", "elvish"] {
        assert!(world.done(&["completions", shell]).contains("--resume") || shell == "fish", "{shell}");
    }
    fails(&world.roll(&["completions", "tcsh"]), 2, &["tcsh", "bash"]);
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let world = World::new(0);
    for arguments in [&["plugins"][..], &["config"], &["man"]] {
        let mut child = world.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && !said(&output).contains("panicked"), "{arguments:?}: {}", said(&output));
    }
}

#[test]
fn a_reward_is_tried_on_a_video_frame_by_frame_with_a_picture_of_its_gradient() {
    let world = World::new(1);
    let said = world.done(&["rewards", "try", "brightness", "0.mp4", "--output", "gradient.png"]);
    for part in ["brightness: -", "luma", "along the gradient", "wrote gradient.png", "#####"] {
        assert!(said.contains(part), "no {part} in: {said}");
    }
    assert!(std::fs::read(world.path("gradient.png")).unwrap().starts_with(b"\x89PNG"));
    fails(&world.roll(&["rewards", "try", "no_such_reward", "0.mp4"]), 2, &["no_such_reward"]);
    let still = world.done(&["rewards", "try", "motion", "0.mp4", "--every", "100"]);
    assert!(still.contains("nothing to score"), "{still}");
}
