//! Rewards that see, on tiny checkpoints: `roll plan`, `roll check` and runs, and the messages for wrong files and clips.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::program::{self, printed, root, stderr_text};
use crate::world::{SETTINGS, SHORT, World};

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

/// A world with VideoReward in its published layout (safetensors instead of `model.pth`), its base's `config.json`, an
/// adapter beside a base model, HPSv3 and a judge.
fn world() -> World {
    let world = World::new(2);
    let copy = |network: &str, file: &str, to: &str| {
        let to = world.path(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(fixture(network, file), to).unwrap();
    };
    copy("videoalign_tiny", "checkpoint_full.safetensors", "VideoReward/checkpoint-11352/model.safetensors");
    copy("videoalign_tiny", "tokenizer.json", "VideoReward/checkpoint-11352/tokenizer/tokenizer.json");
    copy("videoalign_tiny", "model_config.json", "VideoReward/model_config.json");
    copy("videoalign_tiny", "hf_config.json", "base/config.json");
    copy("videoalign_tiny", "adapter_model.safetensors", "own/checkpoint-5/adapter_model.safetensors");
    copy("videoalign_tiny", "template.txt", "question.txt");
    copy("hpsv3_tiny", "template.txt", "rate.txt");
    copy("qwen25vl_tiny", "model.safetensors", "newer/model.safetensors");
    write_judge(&world.path("judge"));
    world
}

/// The options of a tiny VideoReward, some replaced.
fn video_reward(network: Value, more: Value) -> Value {
    let mut options = json!({
        "name": "videoalign",
        "model": {"name": "qwen_vl", "model_path": "VideoReward/checkpoint-11352", "config_path": "base"},
        "prompt_file": "question.txt", "model_config": "VideoReward/model_config.json", "min_pixels": 128,
    });
    options["model"].as_object_mut().unwrap().extend(network.as_object().unwrap().clone());
    options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    options
}

/// `roll COMMAND` for Reward-FL on `reward` with small clips.
fn with_reward(world: &World, command: &[&str], reward: &Value, settings: &[&str]) -> Output {
    let reward = format!("reward={reward}");
    let mut arguments = command.to_vec();
    let all = SETTINGS.iter().chain(&SHORT).chain(settings).copied().chain([reward.as_str()]);
    all.for_each(|setting| arguments.extend(["--set", setting]));
    world.roll(&arguments)
}

#[test]
fn every_reward_that_sees_is_planned_checked_and_trained_on() {
    let world = world();
    let network = |path: &str| json!({"name": "qwen_vl", "model_path": path});
    let hpsv3 = json!({
        "name": "qwen_vl", "model_path": fixture("hpsv3_tiny", "model.safetensors"),
        "config_path": fixture("hpsv3_tiny", "hf_config.json"), "tokenizer_path": fixture("hpsv3_tiny", "tokenizer.json"),
    });
    for reward in [
        video_reward(json!({}), json!({})),
        // An odd number of frames is rounded to an even one, and an odd clip of them has its last frame twice.
        video_reward(json!({}), json!({"frames": 3})),
        video_reward(json!({}), json!({"frames": 5})),
        json!({"name": "hpsv3", "model": hpsv3, "prompt_file": "rate.txt", "min_pixels": 512, "max_pixels": 1024}),
        json!({"name": "judge", "local": network("judge"), "questions": ["Is it {prompt}?"], "max_pixels": 1024}),
    ] {
        let name = reward["name"].as_str().unwrap();
        let planned = with_reward(&world, &["plan", "--json", "-q"], &reward, &[]);
        let plan: Value = serde_json::from_str(&printed(&planned)).unwrap_or_else(|_| panic!("{}", said(&planned)));
        for item in ["weights", "one block", "block inputs"] {
            let of_reward = plan["memory"].as_array().unwrap().iter().find(|x| x["name"] == format!("{name}: {item}"));
            assert!(of_reward.is_some_and(|item| item["device"].as_f64().unwrap() > 0.0), "{name}: {plan}");
        }
        let checked = with_reward(&world, &["check"], &reward, &[]);
        assert!(checked.status.success() && !said(&checked).contains("PROBLEM"), "{name}: {}", said(&checked));
        let warnings = said(&checked).matches("is not the published text").count();
        assert_eq!(warnings, usize::from(name != "judge"), "{}", said(&checked));
        let run = with_reward(&world, &["run", "--steps", "1"], &reward, &["ranks=1"]);
        assert!(run.status.success(), "{reward}: {}", said(&run));
    }
}

#[test]
fn a_wrong_file_or_option_is_named_with_the_remedy() {
    let world = world();
    let none = json!({});
    for (network, more, parts) in [
        (
            json!({"model_path": "newer"}),
            &none,
            &["newer/model.safetensors", "those of Qwen2.5-VL", "its config.json"][..],
        ),
        (json!({"model_path": "VideoReward"}), &none, &["no weights", "VideoReward/checkpoint-11352"]),
        (json!({"model_path": "own/checkpoint-5"}), &none, &["holds an adapter", "`reward.model.adapter_path`"]),
        (json!({"config_path": null}), &none, &["`reward.model.config_path`", "base model"]),
        (
            json!({"tokenizer_path": fixture("hpsv3_tiny", "tokenizer.json")}),
            &none,
            &["`reward.model`", "<|VQ_reward|>", "the tokenizer beside it"],
        ),
        (json!({}), &json!({"frames": 1}), &["reward.0.frames", "from 2 to 768"]),
        (json!({}), &json!({"prompt_file": "rate.txt"}), &["reward.prompt_file", "`<|VQ_reward|>` once"]),
        (json!({}), &json!({"device": "libtorch-cuda:x"}), &["reward.0.device", "libtorch-cuda:N"]),
        (json!({}), &json!({"device": "flex:1"}), &["reward.0.device", "has one device"]),
    ] {
        for command in [&["check"][..], &["run", "--steps", "1"]] {
            let output = with_reward(&world, command, &video_reward(network.clone(), more.clone()), &["backend=flex"]);
            let said = said(&output);
            assert!(!output.status.success(), "{command:?} {network} {more}: {said}");
            parts
                .iter()
                .for_each(|part| assert!(said.contains(part), "{command:?} {network} {more}: no {part}: {said}"));
        }
    }
}

#[test]
fn prompts_and_clips_that_cannot_be_rated_are_named() {
    let world = world();
    std::fs::write(world.path("metadata.csv"), "video,prompt\n0.mp4,a <|MQ_reward|> square\n").unwrap();
    let fails = |command: &[&str], reward: &Value, settings: &[&str]| {
        let output = with_reward(&world, command, reward, &[&["ranks=1"], settings].concat());
        assert!(!output.status.success(), "{}", said(&output));
        said(&output)
    };
    let run = |reward: &Value, settings: &[&str]| fails(&["run", "--steps", "1"], reward, settings);
    let all = video_reward(json!({}), json!({}));
    for message in [run(&all, &[]), fails(&["check"], &all, &[])] {
        assert!(message.contains("`<|MQ_reward|>`") && message.contains("a <|MQ_reward|> square"), "{message}");
    }
    // Without text alignment, no prompt is read.
    let quality = video_reward(json!({}), json!({"dimensions": {"VQ": 1, "MQ": 1}}));
    let output = with_reward(&world, &["run", "--steps", "1"], &quality, &["ranks=1"]);
    assert!(!stderr_text(&output).contains("MQ_reward"), "{}", said(&output));
    let refused = video_reward(json!({}), json!({"on_missing": "error"}));
    let message = run(&refused, &["data.num_frames=1"]);
    assert!(message.contains("a clip of at least 2 frames, found 1 of 64 x 64"), "{message}");
}

#[test]
fn the_device_of_a_reward_is_used_or_its_idleness_is_said() {
    let world = world();
    let reward = video_reward(json!({}), json!({"device": "flex"}));
    let output = with_reward(&world, &["check"], &reward, &["backend=flex"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("`reward.0.device` has no effect"), "{}", said(&output));
    let output = with_reward(&world, &["check"], &json!({"name": "brightness", "device": "flex"}), &["backend=flex"]);
    assert!(said(&output).contains("the reward `brightness` has no network"), "{}", said(&output));
    let plan = |reward: &Value, backend: &str| {
        let output = with_reward(&world, &["plan", "--json", "-q", "--on", "1x24"], reward, &[backend]);
        assert!(output.status.success(), "{}", said(&output));
        serde_json::from_str::<Value>(&printed(&output)).unwrap()
    };
    // On a CPU beside a GPU, the network takes host memory; on a second GPU, it is listed there.
    let of_weights = |plan: &Value| {
        let item = plan["memory"].as_array().unwrap().iter().find(|item| item["name"] == "videoalign: weights");
        item.map(|item| ["device", "host"].map(|place| item[place].as_f64().unwrap() > 0.0))
    };
    let gpu = "backend=libtorch-cuda";
    assert_eq!(of_weights(&plan(&reward, gpu)), Some([false, true]));
    let second = plan(&video_reward(json!({}), json!({"device": "libtorch-cuda:1"})), gpu);
    assert_eq!(of_weights(&second), None, "{second}");
    assert!(second.to_string().contains("libtorch-cuda:1"), "{second}");
    let unknown = video_reward(json!({}), json!({"device": "flax"}));
    let output = with_reward(&world, &["plan"], &unknown, &[]);
    assert!(!output.status.success() && said(&output).contains("the backends are"), "{}", said(&output));
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
