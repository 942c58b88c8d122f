//! Rewards that see, on tiny checkpoints: `roll plan`, `roll check` and runs, and the messages for wrong files and clips.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::program::{self, printed, root, stderr_text};

/// A file of a fixture.
fn fixture(network: &str, file: &str) -> String {
    root().join("tests/fixtures").join(network).join(file).to_str().unwrap().into()
}

/// The tokenizer of HPSv3's fixture for a judge. The tiny vocabulary has no words: two tokens that no question needs
/// become yes and no.
fn judge_tokenizer() -> String {
    let tokenizer = std::fs::read_to_string(fixture("hpsv3_tiny", "tokenizer.json")).unwrap();
    tokenizer.replace("<|vision_pad|>", "yes").replace("<|Reward|>", "no")
}

/// Writes a tiny judge as `demo/judge/train.py` does.
fn write_judge(directory: &Path) {
    std::fs::create_dir_all(directory).unwrap();
    for (file, name) in [("hf_config.json", "config.json"), ("model.safetensors", "model.safetensors")] {
        std::fs::copy(fixture("hpsv3_tiny", file), directory.join(name)).unwrap();
    }
    std::fs::write(directory.join("tokenizer.json"), judge_tokenizer()).unwrap();
}

fn said(output: &Output) -> String {
    format!("{}{}", printed(output), stderr_text(output))
}

#[test]
fn the_demo_of_a_judge_inside_is_checked_and_trains() {
    let directory = tempfile::tempdir().unwrap();
    let mut text = std::fs::read_to_string(root().join("demo/judge/warm.yaml")).unwrap();
    for name in ["judge-vlm-1", "judge-vlm-2"] {
        let judge = directory.path().join(name);
        write_judge(&judge);
        let written = format!("target/{name}");
        assert!(text.contains(&written), "{text}");
        text = text.replace(&written, judge.to_str().unwrap());
    }
    let path = directory.path().join("warm.yaml");
    std::fs::write(&path, text).unwrap();
    let config = ["--config", path.to_str().unwrap()];
    let checked = program::roll(&root(), &[&["check"], &config[..]].concat());
    assert!(checked.status.success() && !said(&checked).contains("PROBLEM"), "{}", said(&checked));
    let out = directory.path().join("run");
    let short = ["--steps", "1", "--out", out.to_str().unwrap(), "--set", "sample_steps=0"];
    let evaluation = ["--set", "evaluation.metadata=null", "--set", "evaluation.train_samples=2"];
    let run = program::roll(&root(), &[&["run"], &config[..], &short, &evaluation].concat());
    assert!(run.status.success(), "{}", said(&run));
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let number = |name: &str| {
        let rows = metrics.lines().map(|row| serde_json::from_str::<Value>(row).unwrap());
        rows.filter_map(|row| row[name].as_f64()).next().unwrap_or_else(|| panic!("no {name} in {metrics}"))
    };
    assert!(number("reward/judge") < 0.0, "a logarithm: {metrics}");
    assert!((0.0..=1.0).contains(&number("eval/train_check_judge")), "a probability: {metrics}");
    assert!(number("actor/grad_norm") > 0.0, "{metrics}");
}
