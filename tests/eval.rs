//! `roll eval`: the base and an adapter side by side.

use std::path::Path;

use serde_json::Value;

use crate::program::{done, roll, stderr_text};

fn json(directory: &Path, arguments: &[&str]) -> Value {
    let output = roll(directory, &[&["eval", "--json"], arguments].concat());
    assert!(output.status.success(), "{}", stderr_text(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_base_and_the_checkpoint_of_a_run_have_the_success_that_the_run_measured() {
    let dir = tempfile::tempdir().unwrap();
    let settings =
        ["algo.num_env_groups=2", "algo.group_size=4", "algo.val_batch_size=12", "training.learning_rate=0.01"];
    let mut arguments = vec!["run", "--algo", "agentic_ppo", "--model", "causal_lm", "--out", "run", "--steps", "2"];
    settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
    done(dir.path(), &arguments);
    let metrics = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    let measured: Vec<Value> = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["val/score/mean"].clone())
        .filter(Value::is_number)
        .collect();
    let found = json(dir.path(), &["run", "--output", "episodes.jsonl"]);
    let models = found["models"].as_array().unwrap();
    let means: Vec<&Value> = models.iter().map(|model| &model["metrics"]["val/score/mean"]).collect();
    assert_eq!(means, [&measured[0], measured.last().unwrap()], "{metrics}");
    assert_eq!((models[0]["model"].as_str(), models[0]["success"]["starts"].as_u64()), (Some("base"), Some(12)));
    let [low, high] = [0, 1].map(|end| models[0]["success"]["ci95"][end].as_f64().unwrap());
    assert!(low < high && found["comparison"]["sign_test"].is_number(), "{found}");
    let episodes = std::fs::read_to_string(dir.path().join("episodes.jsonl")).unwrap();
    assert_eq!(episodes.lines().count(), 24, "every episode of both models");

    let sampled = json(dir.path(), &["run", "--samples", "2", "--episodes", "4"]);
    assert!(sampled["models"][0]["metrics"]["val/env/pass@2"].is_number(), "the run's temperature is 0: {sampled}");

    let table = roll(dir.path(), &["eval", "run", "--episodes", "4", "-q"]);
    let text = String::from_utf8(table.stdout.clone()).unwrap();
    assert!(table.status.success() && text.contains("success") && text.contains("on 4 starts"), "{text}");
}

#[test]
fn every_question_of_a_file_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let rows: String =
        (0..7).map(|i| format!("{{\"question\": \"What is {i} + 1?\", \"answer\": {}}}\n", i + 1)).collect();
    std::fs::write(dir.path().join("exam.jsonl"), rows).unwrap();
    let found = json(
        dir.path(),
        &[
            "--questions",
            "exam.jsonl",
            "--samples",
            "2",
            "--set",
            "algo.max_tokens_per_step=4",
            "--output",
            "all.jsonl",
        ],
    );
    let model = &found["models"][0];
    assert_eq!(model["success"]["starts"], 7, "{found}");
    assert!(model["metrics"]["val/env/pass@2"].is_number(), "{found}");
    assert_eq!(found["comparison"], Value::Null);
    let episodes = std::fs::read_to_string(dir.path().join("all.jsonl")).unwrap();
    assert_eq!(episodes.lines().count(), 14);
    for i in 0..7 {
        assert!(episodes.contains(&format!("What is {i} + 1?")), "{episodes}");
    }
}

#[test]
fn what_cannot_be_evaluated_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |arguments: &[&str]| {
        let output = roll(dir.path(), &[&["eval"], arguments].concat());
        assert!(!output.status.success(), "{arguments:?}");
        stderr_text(&output)
    };
    let clips = refused(&["--algo", "reward_fl", "--model", "wan2_2"]);
    assert!(clips.contains("trains on clips"), "{clips}");
    let nothing = refused(&[]);
    assert!(nothing.contains("environment"), "{nothing}");
    let missing = refused(&["--questions", "missing.jsonl"]);
    assert!(missing.contains("missing.jsonl"), "{missing}");
}
