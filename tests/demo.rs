//! `roll run` with nothing named: the demo in `demo/assets`.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::program::{command, done, fails, printed, roll, said};
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
fn a_short_demo_says_what_changed_shows_it_and_gives_the_same_numbers_again() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let output = roll_run(dir.path(), &SHORT);
        assert!(output.status.success(), "{}", said(&output));
        let said = printed(&output);
        assert!(said.contains("unseen") && said.contains("report.html"), "{said}");
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
    for file in ["curves.png", "comparison.mp4", "comparison.png", "report.html", "samples/before", "samples/after"] {
        assert!(run.join(file).exists(), "{file}");
    }
    let rows = metrics(&run);
    assert_eq!(rows.len(), 3, "before training, and two steps");
    assert_eq!(rows, metrics(&again));
}

#[test]
fn without_its_files_the_error_says_what_to_run() {
    let dir = tempfile::tempdir().unwrap();
    let output = command(dir.path(), &["run"]).env("ROLL_DEMO", dir.path()).output().unwrap();
    fails(&output, 2, &["ROLL_DEMO=", "git checkout demo/assets"]);
    assert!(!dir.path().join("runs").exists());
}

#[test]
fn an_algorithm_without_its_kind_of_model_says_which_to_take() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, parts) in [
        (["--algo", "agentic_ppo"], ["trains language models", "`--model causal_lm`"]),
        (["--algo", "sft"], ["trains language models", "`--model causal_lm`"]),
        (["--model", "causal_lm"], ["trains video models", "agentic_ppo, sft"]),
    ] {
        fails(&roll_run(dir.path(), &arguments), 2, &parts);
    }
}

#[test]
fn a_model_or_clips_named_alone_are_told_to_be_no_demo() {
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
fn a_gpu_has_one_rank_with_the_samples_of_four() {
    let dir = tempfile::tempdir().unwrap();
    for (backend, ranks, samples) in [("flex", "4", "1"), ("libtorch", "4", "1"), ("cuda:1", "1", "4")] {
        let said = done(dir.path(), &["config", "--backend", backend]);
        let value = |key: &str| {
            let line = said.lines().find(|line| line.starts_with(&format!("{key}:")))?;
            line.split_whitespace().nth(1)
        };
        let found = [value("ranks"), value("training.per_device_train_batch_size")];
        assert_eq!(found, [Some(ranks), Some(samples)], "{backend}: {said}");
    }
}
