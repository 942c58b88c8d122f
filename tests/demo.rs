//! `roll run` with nothing named: the demo in `demo/assets`.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::program::{command, done, fails, printed, roll, stderr_text};
use crate::world::metrics;

/// `roll run` in `directory`.
fn roll_run(directory: &Path, arguments: &[&str]) -> Output {
    roll(directory, &[&["run"], arguments].concat())
}

const SHORT: [&str; 6] = ["--steps", "2", "--set", "evaluation.samples=2", "--set", "evaluation.train_samples=2"];

fn summary(run: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap()
}

#[test]
fn the_demo_reports_its_results_and_is_reproducible() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let output = roll_run(dir.path(), &SHORT);
        assert!(output.status.success(), "{}", stderr_text(&output));
        let printed_text = printed(&output);
        assert!(printed_text.contains("unseen") && printed_text.contains("report.html"), "{printed_text}");
    }
    let (run, again) = (dir.path().join("runs/demo"), dir.path().join("runs/demo-2"));
    let figures = summary(&run);
    for key in ["identity_before", "identity_after", "unseen_before", "unseen_after", "kl", "seconds"] {
        assert!(figures[key].as_f64().is_some_and(f64::is_finite), "{key}: {}", figures[key]);
    }
    for key in ["unseen_check_before", "unseen_check_after"] {
        assert!(figures[key].is_number(), "{key}");
    }
    let [low, high] = [0, 1].map(|i| figures["unseen_gain"]["ci95"][i].as_f64().unwrap());
    assert!(low <= high);
    for file in ["curves.svg", "comparison.mp4", "comparison.png", "report.html", "samples/before", "samples/after"] {
        assert!(run.join(file).exists(), "{file}");
    }
    let rows = metrics(&run);
    assert_eq!(rows.len(), 3, "before training, and two steps");
    assert_eq!(rows, metrics(&again));
}

#[test]
fn the_picture_demo_draws_held_out_prompts_before_and_after() {
    let dir = tempfile::tempdir().unwrap();
    let picture = [&["run", "--model", "z_image"], &SHORT[..]].concat();
    let printed_text = done(dir.path(), &picture);
    assert!(printed_text.contains("unseen check"), "{printed_text}");
    let run = dir.path().join("runs/picture");
    for file in ["comparison.png", "report.html", "samples/before/unseen-001.png", "samples/after/unseen-001.png"] {
        assert!(run.join(file).is_file(), "{file}");
    }
    assert_eq!(metrics(&run).len(), 3, "before training, and two steps");
}

/// In a network namespace of its own there is no interface that reaches anything, not even this machine.
#[cfg(target_os = "linux")]
#[test]
fn the_demo_runs_without_a_network() {
    let without_network = |program: &str, arguments: &[&str]| {
        let mut command = std::process::Command::new("unshare");
        command.args(["--map-root-user", "--net", program]).args(arguments);
        command
    };
    if !without_network("true", &[]).output().is_ok_and(|output| output.status.success()) {
        roll_testing::skip!("`unshare` cannot make a namespace of its own");
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = without_network(crate::program::PATH, &["run", "--steps", "1"]);
    command
        .args(&SHORT[2..])
        .env("ROLL_CACHE", "none")
        .env("ROLL_STATE", crate::program::STATE)
        .current_dir(dir.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(dir.path().join("runs/demo/report.html").is_file());
}

#[test]
fn the_demo_without_its_files_names_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let output = command(dir.path(), &["run"]).env("ROLL_DEMO", dir.path()).output().unwrap();
    fails(&output, 2, &["ROLL_DEMO=", "git checkout demo/assets"]);
    assert!(!dir.path().join("runs").exists());
}

#[test]
fn suggests_the_model_that_an_algorithm_trains() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, parts) in [
        (["--algo", "agentic_ppo"], ["trains language models", "`--model causal_lm`"]),
        (["--algo", "sft"], ["trains language models", "`--model causal_lm`"]),
        (["--algo", "dpo"], ["trains language models", "`--model causal_lm`"]),
        (["--model", "causal_lm"], ["trains video models", "agentic_ppo, sft, dpo"]),
    ] {
        fails(&roll_run(dir.path(), &arguments), 2, &parts);
    }
}

#[test]
fn model_or_clips_alone_disable_the_demo_with_a_message() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("metadata.csv"), "video,prompt\nclip.mp4,a wave\n").unwrap();
    std::fs::write(dir.path().join("clip.mp4"), "").unwrap();
    let (clips, model) = ("data.metadata=metadata.csv", "model.model_paths=paths.json");
    for (setting, named, lacking) in
        [(clips, "`data.metadata`", "model.model_paths"), (model, "`model.model_paths`", "data.metadata")]
    {
        let output = roll_run(dir.path(), &["--set", setting]);
        fails(&output, 2, &[&format!("{named} is set, so this is not the demo"), lacking]);
    }
}

#[test]
fn the_demo_on_a_gpu_has_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    for (model, backend, ranks, samples) in [
        ("wan2_2", "flex", "4", "1"),
        ("wan2_2", "libtorch", "4", "1"),
        ("wan2_2", "cuda:1", "1", "4"),
        ("z_image", "flex", "4", "4"),
        ("z_image", "cuda:1", "1", "16"),
    ] {
        let printed_text = done(dir.path(), &["config", "--model", model, "--backend", backend]);
        let value = |key: &str| {
            let line = printed_text.lines().find(|line| line.starts_with(&format!("{key}:")))?;
            line.split_whitespace().nth(1)
        };
        let found = [value("ranks"), value("training.per_device_train_batch_size")];
        assert_eq!(found, [Some(ranks), Some(samples)], "{model} on {backend}: {printed_text}");
    }
}
