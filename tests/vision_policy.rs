//! The model `qwen_vl` from the command line: plan, check, training, answers about a picture, its adapters elsewhere.

use std::process::Command;

use roll_core::{Tensor, Video};
use roll_network::tokenizer::Tokenizer;
use serde_json::Value;

use crate::program::root;
use crate::world::{World, fails, stderr_text};

/// Supervised training of the small model in `eyes`.
const TRAINING: [&str; 9] = [
    "backend=flex",
    "model.model_path=eyes",
    "model.lora_rank=4",
    "model.lora_alpha=8",
    "model.max_pixels=6400",
    "algo.data=talk.jsonl",
    "algo.batch_size=2",
    "training.learning_rate=1e-2",
    "training.warmup_steps=0",
];

/// A world with a small model, a conversation, and a picture of 56 x 56 pixels.
fn world() -> World {
    let world = World::new(0);
    world.done(&["init-tiny", "eyes", "--kind", "qwen_vl"]);
    let line = r#"{"messages": [{"role": "user", "content": "hue?"}, {"role": "assistant", "content": "red"}]}"#;
    std::fs::write(world.path("talk.jsonl"), format!("{line}\n{line}\n")).unwrap();
    let pixels: Vec<f32> = (0..3 * 56 * 56).map(|i| (i as f32 * 0.01).sin().signum() * 0.6).collect();
    let picture = Video::new(Tensor::new(pixels, [1, 3, 56, 56]).unwrap(), 8.0).unwrap();
    let files = roll_media::write_pngs(world.path("pictures"), &picture).unwrap();
    std::fs::rename(&files[0], world.path("picture.png")).unwrap();
    world
}

/// `roll COMMAND` of the training, with further arguments.
fn training<'a>(command: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let model = ["--algo", "sft", "--model", "qwen_vl"];
    let settings = TRAINING.iter().flat_map(|setting| ["--set", setting]);
    command.iter().copied().chain(model).chain(settings).chain(more.iter().copied()).collect()
}

#[test]
fn a_model_that_sees_is_planned_checked_trained_and_asked_about_pictures() {
    let world = world();
    let plan: Value = serde_json::from_str(&world.done(&training(&["plan", "--json", "-q"], &[]))).unwrap();
    for name in ["vision tower", "a picture in the tower", "pictures that were seen", "frozen weights"] {
        let item = plan["memory"].as_array().unwrap().iter().find(|item| item["name"] == name);
        let bytes = item.map(|item| item["device"].as_f64().unwrap() + item["host"].as_f64().unwrap());
        assert!(bytes.is_some_and(|bytes| bytes > 0.0), "{name}: {plan}");
    }
    let checked = world.done(&training(&["check"], &[]));
    assert!(checked.contains("vision-language model") && !checked.contains("PROBLEM"), "{checked}");
    world.done(&training(&["run", "--steps", "4", "--out", "run"], &[]));
    let ask = |more: &[&str]| {
        let asked = ["ask", "hue?", "--image", "picture.png", "--max-new-tokens", "6", "--set", "backend=flex"];
        world.done(&[&asked[..], more].concat())
    };
    let answer = ask(&["--model-path", "eyes", "--adapter", "run"]);
    assert_ne!(answer, ask(&["--model-path", "eyes"]), "the adapter matters");
    world.done(&["merge-lora", "eyes", "run", "merged"]);
    assert_eq!(ask(&["--model-path", "merged"]), answer);
    // Fewer pixels are fewer tokens.
    let asked = ["ask", "hue?", "--image", "picture.png", "--max-new-tokens", "1", "--model-path", "eyes"];
    let tokens = |more: &[&str]| {
        let output = world.roll(&[&asked[..], more].concat());
        let said = stderr_text(&output);
        let before = said.split(" tokens in").next().unwrap().to_string();
        before
            .rsplit(|c: char| !c.is_ascii_digit())
            .next()
            .unwrap()
            .parse::<usize>()
            .unwrap_or_else(|_| panic!("{said}"))
    };
    assert_eq!(tokens(&[]), tokens(&["--max-pixels", "800"]) + 3, "4 squares, and 1");
    let output = world.roll(&["ask", "hue?", "--image", "picture.png", "--model-path", "model.gguf"]);
    fails(&output, 2, &["model.model_path", "GGUF", "causal_lm"]);
}

#[test]
fn transformers_with_the_adapter_by_peft_answers_alike() {
    let world = world();
    world.done(&training(&["run", "--steps", "4", "--out", "run"], &[]));
    let asked = ["ask", "\nhue?", "--image", "picture.png", "--raw", "--max-new-tokens", "6", "--set", "backend=flex"];
    let answer = world.done(&[&asked[..], &["--model-path", "eyes", "--adapter", "run"]].concat());
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let mut command = Command::new(&python);
    command.arg(root().join("tests/scripts/peft_vision.py")).current_dir(world.path("."));
    command.args(["eyes", "run/checkpoints/step-000004", "picture.png", "\u{fffc}\nhue?", "6"]);
    let output = match command.output() {
        Ok(output) => output,
        Err(e) => roll_testing::skip!(format!("{python}: {e}"), needs = "diffusers"),
    };
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.code() {
        Some(77) => roll_testing::skip!(printed.trim().to_string(), needs = "diffusers"),
        Some(0) => {}
        _ => panic!("{printed}\n{}", stderr_text(&output)),
    }
    let mut ids: Vec<u32> = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    let tokenizer = Tokenizer::load(&world.path("eyes/tokenizer.json")).unwrap();
    let ends = ["<|im_end|>", "<|endoftext|>"].map(|token| tokenizer.id(token).unwrap());
    ids.truncate(ids.iter().position(|id| ends.contains(id)).unwrap_or(ids.len()));
    assert_eq!(tokenizer.decode(&ids).unwrap().trim_end(), answer.trim_end());
}
