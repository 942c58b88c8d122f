//! ROLL's Reward-FL configuration, in its own words and files, runs as it is.

#![allow(clippy::unwrap_used)]

mod roll_yaml;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use roll_core::{Tensor, Video};
use roll_yaml::FILE;

fn roll(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_roll"))
        .env("ROLL_CACHE", "none")
        .args(arguments)
        .current_dir(directory)
        .output()
        .unwrap()
}

#[test]
fn rolls_configuration_runs_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    roll_yaml::write(here, 2);
    std::fs::create_dir_all(here.join("data")).unwrap();
    std::fs::write(here.join("data/metadata.csv"), "video,prompt\nclip.mp4,a grey square\n").unwrap();
    let video = Video::new(Tensor::full([9, 3, 64, 64], 0.1), 8.0).unwrap();
    roll_data::write_mp4(here.join("data/clip.mp4"), &video).unwrap();
    assert!(roll(here, &["init-tiny", "tiny"]).status.success());

    let config = ["--config", FILE];
    let listed = roll(here, &[&["config"], &config[..]].concat());
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let said = String::from_utf8_lossy(&listed.stderr).into_owned();
    assert!(listed.status.success(), "{said}");
    for (key, value, origin) in [
        ("strategy.stage", "2", "deepspeed_zero2_cpuoffload.yaml"),
        ("reward.0.reward_model_path", "\"./antelopev2/\"", "reward_fl_config.yaml"),
        ("reward.0.channel_order", "\"bgr\"", "as in ROLL"),
        ("training.gradient_accumulation_steps", "2", "2 devices"),
        ("model.lora_rank", "4", "reward_fl_config.yaml"),
    ] {
        let line = text.lines().find(|l| l.split_whitespace().next() == Some(key)).unwrap_or_else(|| panic!("{text}"));
        assert!(line.contains(value) && line.contains(origin), "{line}");
    }
    assert_eq!(said.matches("without effect here").count(), 1, "{said}");
    assert!(said.contains("system_envs") && said.contains("min_timestep_boundary"), "{said}");

    // The face networks are not in the repository: another reward stands in their place.
    let smaller = ["--steps", "1", "--set", "reward={name: brightness}", "--set", "data.num_frames=5"];
    let output = roll(here, &[&["run"], &config[..], &smaller[..]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert_eq!(said.matches("without effect here").count(), 1, "listed once: {said}");
    let run = here.join("output/as_in_roll");
    assert!(run.join("checkpoints/step-000001/adapter.safetensors").exists());
    let row = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert_eq!(row.lines().count(), 1, "{row}");
}

#[cfg(unix)]
#[test]
fn rolls_configuration_trains_on_faces_and_its_eight_samples_of_one_clip_differ() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    roll_yaml::write(here, 8);
    roll_yaml::demo_world(here);
    let output = roll(here, &[&["run", "--config", FILE][..], &roll_yaml::DEMO_SETTINGS].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");

    let run = here.join("output/as_in_roll");
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let rows: Vec<serde_json::Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    for row in &rows {
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"));
        assert_eq!((number("actor/samples"), number("actor/skipped")), (8.0, 0.0), "{row}");
        assert!(number("actor/face_score").abs() <= 1.0 && number("actor/grad_norm") > 0.0, "{row}");
    }
    let videos = roll_yaml::samples(&run, 1);
    let different: BTreeSet<&Vec<u8>> = videos.iter().map(|(_, bytes)| bytes).collect();
    assert_eq!((videos.len(), different.len()), (8, 8), "{:?}", videos.iter().map(|(f, _)| f).collect::<Vec<_>>());
}
